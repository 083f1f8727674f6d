"""How log lines are written: as text for people, or as JSON for log collectors. Does not know what is logged."""

import json
import logging
import sys
from datetime import UTC, datetime

from inflight.server.operations.request_ids import current_request_id


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


def set_up_logging(*, as_json: bool, level: str = "INFO") -> None:
    """Send all log lines of this process to standard error, uvicorn's included if its `log_config` is None, except its
    access log, which `AccessLog` replaces."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("uvicorn.access").propagate = False
