"""The protocol between a caller and an engine's loop: commands, events, and how a pipe carries them.

A frame holds one message in MessagePack that names its type. Times are those of `time.monotonic()`, which all processes
of a machine share. `Session` uses each `request_id` once, so a late message about an abandoned request is never
mistaken for another's.
"""

from collections.abc import Callable
from queue import SimpleQueue
from typing import IO, Any, TypeAlias

import msgspec

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.outputs import SequenceOutput
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.api.pooling import PooledText
from inflight.contracts.api.watching import Watching
from inflight.contracts.step.live import LiveState
from inflight.contracts.step.multimodal import MultimodalInputs
from inflight.contracts.step.record import EngineStats, RecordTo
from inflight.host.python_process import framed, read_frame


class Load(msgspec.Struct, tag=True, frozen=True):
    """The first frame: the engine to make, from hub ids or folders, its CPUs, and the inherited file for its weights
    (`execution.shared_memory`)."""

    model: str
    tokenizer: str | None
    config: EngineConfig
    watching: Watching = Watching()
    cpus: tuple[int, ...] | None = None
    weights_file: int | None = None


class Generate(msgspec.Struct, tag=True, frozen=True):
    """Run a request, and report each of its sequences until it ends.

    Attributes:
        text: the text to pool, instead of a prompt; None: it generates.
        multimodal: the images and sounds of the prompt; None: it has none.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    adapter_source: str | None = None
    deadline: float | None = None
    text: PooledText | None = None
    multimodal: MultimodalInputs | None = None


class GenerateMany(msgspec.Struct, tag=True, frozen=True):
    """Run several requests, all queued before the next step."""

    requests: list[Generate]


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End a request, if it is unfinished."""

    request_id: str


class AskStats(msgspec.Struct, tag=True, frozen=True):
    """Answer with `Stats` of the same `request_id`."""

    request_id: str


class AskLive(msgspec.Struct, tag=True, frozen=True):
    """Answer with `Live` of the same `request_id`. While these keep coming, steps are recorded in `record_to`."""

    request_id: str
    record_to: RecordTo | None = None


class OpenAdapter(msgspec.Struct, tag=True, frozen=True):
    """Load the adapter of a folder or a hub repository, and answer with `Done` of the same `request_id`."""

    request_id: str
    source: str


class CloseAdapter(msgspec.Struct, tag=True, frozen=True):
    """Unload an adapter; running requests keep it."""

    source: str


class SavePrefixes(msgspec.Struct, tag=True, frozen=True):
    """Save all cached blocks in `prefix_cache_dir`, and answer with `Done` of the same `request_id`."""

    request_id: str


class PinPrefix(msgspec.Struct, tag=True, frozen=True):
    """Pin the saved blocks of a prompt in `prefix_cache_dir`, and answer with `Done` of the same `request_id`."""

    request_id: str
    token_ids: list[int]
    cache_salt: str | None = None
    adapter_source: str | None = None


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine is loaded."""

    model_info: ModelInfo
    default_params: SamplingParams


class Outputs(msgspec.Struct, tag=True, frozen=True):
    """The outputs of one step, or of an abort."""

    outputs: list[SequenceOutput]


class Stats(msgspec.Struct, tag=True, frozen=True):
    """The answer to `AskStats`."""

    request_id: str
    value: EngineStats


class Live(msgspec.Struct, tag=True, frozen=True):
    """The answer to `AskLive`."""

    request_id: str
    value: LiveState


class Done(msgspec.Struct, tag=True, frozen=True):
    """A command without a result succeeded."""

    request_id: str
    value: None = None


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A command was refused; `error` is the name of the class to raise."""

    request_id: str
    error: str
    message: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine could not be made (a `ModelError`), or its loop failed. The last event."""

    message: str
    is_model_error: bool = False


Command: TypeAlias = (
    Generate | GenerateMany | Abort | AskStats | AskLive | OpenAdapter | CloseAdapter | SavePrefixes | PinPrefix
)
Event: TypeAlias = Ready | Outputs | Stats | Live | Done | Refused | Failed
Commands: TypeAlias = "SimpleQueue[Command | Callable[[], None] | None]"
"""The queue of an engine's loop: commands, and its own deferred calls; None: end."""


def _plain(value: Any) -> Any:
    """Encode a value without a MessagePack type: a numpy number, or a sequence."""
    return float(value) if isinstance(value, float) else list(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_load_decoder = msgspec.msgpack.Decoder(Load)
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def to_frame(message: Load | Command | Event) -> bytes:
    """A message as a frame."""
    return framed(_encoder.encode(message))


def read_load(stream: IO[bytes]) -> Load | None:
    """The first message; None at the end of the stream."""
    payload = read_frame(stream)
    return None if payload is None else _load_decoder.decode(payload)


def read_command(stream: IO[bytes]) -> Command | None:
    """The next command; None at the end of the stream."""
    payload = read_frame(stream)
    return None if payload is None else _command_decoder.decode(payload)


def read_event(stream: IO[bytes]) -> Event | None:
    """The next event; None at the end of the stream, even if it comes in the middle of a frame."""
    payload = read_frame(stream)
    return None if payload is None else _event_decoder.decode(payload)
