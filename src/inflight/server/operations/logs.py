"""Formats of log lines: text for people, or JSON for log collectors.

Imports nothing of the server, because it is set up before the engine starts.
"""

import atexit
import json
import logging
import os
import sys
import threading
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

SECONDS_FOR_LAST_LINES = 2.0

current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)
"""The id of the HTTP request that is being served in this context."""

printed = logging.getLogger("inflight.printed")
"""The logger for printed lines of libraries, the engine's process and the interpreter."""


class JsonLines(logging.Formatter):
    """One JSON object per line: time, level, logger, message, request id, and the `fields` of the record's `extra`.

    (Everything but ASCII is escaped, line breaks too, so that no text can pose as another line.)
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = current_request_id.get()
        if request_id is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """One line for people: time, level, message, and in brackets the request's id and its client."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        client = getattr(record, "fields", {}).get("client")
        known = (current_request_id.get(), client and f"client {client}")
        return super().formatMessage(record) + (f" ({shown})" if (shown := ", ".join(filter(None, known))) else "")


def set_up_logging(*, as_json: bool, level: str = "INFO") -> None:
    """Send all log lines of this process to standard error, uvicorn's included if its `log_config` is None, except its
    access log, which `AccessLog` replaces.

    Args:
        as_json: whether they are JSON. Then whatever else this process or its children print becomes such lines, too.
    """
    handler = logging.StreamHandler(_standard_error_for_json() if as_json else sys.stderr)
    handler.setFormatter(JsonLines() if as_json else TextLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("uvicorn.access").propagate = False
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # other log lines cover the rest


def _standard_error_for_json() -> TextIO:
    """Return standard error as it was, for the log alone; lines that others print are logged, not printed."""
    descriptors = (1, 2)
    originals = [os.dup(each) for each in descriptors]
    readable, writable = os.pipe()
    for each in descriptors:
        os.dup2(writable, each)
    os.close(writable)
    reader = threading.Thread(target=_log_lines, args=(readable,), name="inflight: printed lines", daemon=True)
    reader.start()

    def restore() -> None:
        """Log printed lines, until the pipe closes with the last child."""
        sys.stdout.flush()
        sys.stderr.flush()
        for each, original in zip(descriptors, originals, strict=True):
            os.dup2(original, each)
        reader.join(SECONDS_FOR_LAST_LINES)

    atexit.register(restore)
    return os.fdopen(os.dup(originals[1]), "w", buffering=1)


def _log_lines(readable: int) -> None:
    with os.fdopen(readable, errors="backslashreplace") as lines:  # a progress bar's carriage returns end lines, too
        for line in lines:
            if line.strip():
                printed.warning("%s", line.rstrip())
