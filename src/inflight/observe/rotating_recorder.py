"""`RotatingRecorder`: recordings of a long-running engine, in files of limited size, of which the last are kept.

Each file is a complete recording (of requests that began in an earlier one, only the steps). A write error ends the
recording with a log line, and never affects the engine.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from inflight.contracts.config import EngineConfig
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.record import RecordTo, StepRecord
from inflight.observe.recorder import Recorder

logger = logging.getLogger("inflight.recording")

SECONDS_BETWEEN_FLUSHES = 1.0


class RotatingRecorder:
    """Writes observed steps to `to.path`; when full, it becomes `PATH.1`, and so on.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self, to: RecordTo, config: EngineConfig, model: ModelInfo, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._to, self._config, self._model, self._clock = to, config, model, clock
        self._path = Path(to.path).expanduser()
        self._key = os.urandom(16)
        self._recorder: Recorder | None = None
        self._last_flush = clock()
        self._trying(self._begin)

    def observe(self, record: StepRecord) -> None:
        """Record one step."""
        if self._recorder is not None:
            self._trying(lambda: self._observe(record))

    def flush(self) -> None:
        """Write the buffer."""
        if self._recorder is not None:
            self._trying(self._recorder.flush)
            self._last_flush = self._clock()

    def close(self) -> None:
        """Flush the buffer, and stop."""
        if self._recorder is not None:
            self._trying(self._recorder.close)
            self._recorder = None

    def _observe(self, record: StepRecord) -> None:
        recorder = self._recorder
        assert recorder is not None
        recorder.observe(record)
        if recorder.num_bytes >= self._to.max_bytes:
            recorder.close()
            self._begin()
        elif self._clock() - self._last_flush >= SECONDS_BETWEEN_FLUSHES:
            self.flush()

    def _begin(self) -> None:
        """Begin a file, renaming earlier ones and deleting the oldest."""
        for number in reversed(range(self._to.num_files)):
            path = self._numbered(number)
            if path.exists() and path.stat().st_size:
                path.replace(self._numbered(number + 1))
        self._numbered(self._to.num_files).unlink(missing_ok=True)
        self._recorder = Recorder(self._path, self._config, self._model, self._key)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path

    def _trying(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, ValueError) as error:
            self._recorder = None
            logger.error("recording of steps has stopped: %s", error)
