"""What rank 0 and the others say to each other, over the standard streams of the others' processes."""

import pickle
from dataclasses import dataclass
from typing import IO, TypeAlias

from inflight.contracts.config import EngineConfig
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.plan import StepPlan
from inflight.engine.frames import framed, read_frame


@dataclass(frozen=True, slots=True)
class Part:
    """The first message to a rank: what it is to load.

    Attributes:
        number, size: which rank it is, of how many.
        cpus: where it may run.
        file: the descriptor of the file through which ranks meet.
        lifeline: the descriptor of a pipe that ends with rank 0.
    """

    model: str
    config: EngineConfig
    number: int
    size: int
    cpus: tuple[int, ...]
    file: int
    lifeline: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step to be computed. Its plan has no assignments: only rank 0 chooses tokens."""

    number: int
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rank has loaded its part."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank is about to end."""

    message: str


Message: TypeAlias = Part | Step | Prepared | Failed


def to_frame(message: Message) -> bytes:
    """A message as a frame."""
    return framed(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def read_message(stream: IO[bytes]) -> Message | None:
    """The next message, from a process that we have started or that has started us; None at the end of the stream."""
    frame = read_frame(stream)
    if frame is None:
        return None
    message: Message = pickle.loads(frame)
    return message
