"""Pickled messages between ranks, over the standard streams of a process started by rank 0."""

import pickle
from dataclasses import dataclass
from subprocess import Popen
from typing import IO, TypeAlias

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.step.plan import StepPlan
from inflight.host.python_process import ending, framed, read_frame


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """A rank's CPUs and the ranks' shared memory.

    Attributes:
        file: the inherited descriptor of the shared file.
        lifeline: the descriptor of a pipe that closes with rank 0.
        cpus: the rank's CPUs.
    """

    file: int
    lifeline: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadShard:
    """The first message to a rank: the model, the rank's number, the number of ranks, and its placement."""

    model: str
    config: EngineConfig
    number: int
    size: int
    place: RankPlacement


@dataclass(frozen=True, slots=True)
class RunStep:
    """A step to compute. Its plan has no assignments: only rank 0 samples."""

    number: int
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has loaded its shard."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank is about to end."""

    message: str


Message: TypeAlias = LoadShard | RunStep | Ready | RankFailed


class StreamLink:
    """One side of a connection between two ranks. One thread sends, one receives."""

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self._incoming, self._outgoing = incoming, outgoing

    def send(self, message: Message) -> None:
        """Raises `OSError` if the other side has ended."""
        self._outgoing.write(framed(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)))
        self._outgoing.flush()

    def receive(self) -> Message | None:
        """Wait for the next message; None: the other side has ended."""
        frame = read_frame(self._incoming)
        return None if frame is None else pickle.loads(frame)


class ProcessLink(StreamLink):
    """Rank 0's, to a process that was started here."""

    def __init__(self, process: "Popen[bytes]") -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        super().__init__(process.stdout, process.stdin)
        self._process = process

    def ending(self) -> str:
        """The process's exit, such as "was killed by SIGKILL"."""
        return ending(self._process.wait())
