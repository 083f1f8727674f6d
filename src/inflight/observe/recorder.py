"""Recordings: the steps of a run as lines of JSON, written while it runs and read back for traces and the simulator.

The first line has the engine's configuration, the model and the machine; each further line is a `StepRecord`. Prompts
are not kept: each full block has only a chained hash, under a key that is discarded. So a replay can share prefixes as
the run did, but no text can be recovered. Knows no engine: the code that runs steps calls `observe`.

`RotatingRecorder`: recordings of a long-running engine, in files of limited size, of which the last are kept.

Each file is a complete recording (of requests that began in an earlier one, only the steps). A write error ends the
recording with a log line, and never affects the engine.
"""

import json
import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.step.block_hash import Root, block_hashes
from inflight.contracts.step.cache_layout import CacheGroup
from inflight.contracts.step.record import ArrivalRecord, PreemptionRecord, RecordTo, SpanRecord, StepRecord

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


FORMAT = 1
STEP_FIELDS = [field.name for field in fields(StepRecord) if field.name != "arrivals"]
MANY_BYTES = 1 << 16
"""Bytes that are buffered before they are written to the file."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded run.

    Attributes:
        config: the effective configuration, with the values of `num_blocks` and `max_model_len` that were derived.
        model: the model that ran; None for a simulated run.
        machine: processor, system and versions, in words.
        steps: in order. Arrivals have substitute prompts, of the same lengths and with the same shared blocks (which
            take cache salts into account).
    """

    config: EngineConfig
    model: ModelInfo | None
    machine: dict[str, str]
    steps: list[StepRecord]

    @property
    def arrivals(self) -> list[ArrivalRecord]:
        """All requests whose submission was recorded, in order."""
        return [arrival for step in self.steps for arrival in step.arrivals]


class Recorder:
    """Writes observed steps to a file; close it, or use it in a `with` statement.

    Args:
        path: the file, which is overwritten.
        config: the requested configuration.
        model: the model that runs, with the derived values; None for a simulation.
        key: of the hashes of prompts; None: a new one. Recordings with the same key have comparable prefixes.

    Attributes:
        num_bytes: bytes written.

    Raises:
        ValueError: the file cannot be written.
    """

    def __init__(
        self, path: Path, config: EngineConfig, model: ModelInfo | None = None, key: bytes | None = None
    ) -> None:
        self._path = path
        self._block_size = config.kv_cache.block_size
        self._key = os.urandom(16) if key is None else key
        self.num_bytes = 0
        try:
            self._file = path.open("wb", buffering=MANY_BYTES)
        except OSError as error:
            raise self._failure(error) from error
        if model is not None:
            config = config.replace(num_blocks=model.num_blocks, max_model_len=model.max_model_len)
        header = {"inflight_recording": FORMAT, "config": asdict(config), "machine": describe_machine()}
        self._write({**header, "model": None if model is None else asdict(model)})

    def observe(self, record: StepRecord) -> None:
        """Record one step."""
        line: dict[str, Any] = {name: getattr(record, name) for name in STEP_FIELDS}
        if record.arrivals:
            line["arrivals"] = [self._about(arrival) for arrival in record.arrivals]
        self._write(line)

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self._file.close()
        except OSError as error:
            raise self._failure(error) from error

    def flush(self) -> None:
        """Flush the buffer."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._failure(error) from error

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self.num_bytes += self._file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> ValueError:
        return ValueError(f"the recording {str(self._path)!r} cannot be written: {error.strerror}")

    def _about(self, arrival: ArrivalRecord) -> dict[str, Any]:
        """Return a request without its tokens."""
        return {
            "request_id": arrival.request_id,
            "time": arrival.time,
            "num_prompt_tokens": len(arrival.prompt_token_ids),
            "block_hashes": self._block_hashes(arrival),
            "num_sequences": arrival.num_sequences,
            "priority": arrival.priority,
        }

    def _block_hashes(self, arrival: ArrivalRecord) -> list[int]:
        """Return one hash per full block of its prompt, of that block and all before it."""
        root = Root(arrival.cache_salt, adapter=arrival.adapter)
        hashes = block_hashes(arrival.prompt_token_ids, self._block_size, root)
        keyed = (blake2b(each, digest_size=8, key=self._key).digest() for each in hashes)
        return [int.from_bytes(digest, "little") for digest in keyed]


def observe_with(*observers: Callable[[StepRecord], None] | None) -> Callable[[StepRecord], None]:
    """Return one observer that calls several in order; None is skipped."""
    present = [observer for observer in observers if observer is not None]

    def observe(record: StepRecord) -> None:
        for observer in present:
            observer(record)

    return observe


def read_recording(path: Path) -> Recording:
    """Read a recording; if its last line is incomplete, because the run was killed, that line is left out.

    Raises `ValueError`, which names the line, if the recording cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the recording {str(path)!r} cannot be read: {error}") from error
    try:
        header = json.loads(lines[0])
        if header["inflight_recording"] != FORMAT:
            raise ValueError("its format is not known")
        config = EngineConfig(**header["config"])
        model = _model_info(header["model"])
        steps: list[StepRecord] = []
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is not a recording of inflight: {error!r}") from error
    for number, line in enumerate(lines[1:-1], start=2):
        try:
            steps.append(_step(json.loads(line), config.kv_cache.block_size))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} of the recording {str(path)!r} is not a step: {error!r}") from error
    return Recording(config, model, header["machine"], steps)


def describe_machine() -> dict[str, str]:
    """Return a recording's machine."""
    packages = {}
    for name in ("torch", "transformers"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "system": platform.system(),
        "python": platform.python_version(),
        **packages,
    }


def _model_info(values: dict[str, Any] | None) -> ModelInfo | None:
    if values is None:
        return None
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return ModelInfo(**values | {"cache_groups": tuple(CacheGroup(**group) for group in values["cache_groups"])})


def _step(values: dict[str, Any], block_size: int) -> StepRecord:
    values["spans"] = tuple(SpanRecord(*span) for span in values["spans"])
    values["preempted"] = tuple(PreemptionRecord(*each) for each in values["preempted"])
    values["arrivals"] = tuple(_arrival(each, block_size) for each in values.get("arrivals", ()))
    return StepRecord(**values)


def _arrival(values: dict[str, Any], block_size: int) -> ArrivalRecord:
    """Return a request with a substitute prompt."""
    prompt: list[int] = []
    for digest in values["block_hashes"]:
        prompt += [digest >> 33, digest >> 2 & 0x7FFFFFFF, *([0] * block_size)][:block_size]
    prompt += [0] * (values["num_prompt_tokens"] - len(prompt))
    return ArrivalRecord(values["request_id"], values["time"], prompt, values["num_sequences"], values["priority"])
