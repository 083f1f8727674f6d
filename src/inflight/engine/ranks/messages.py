"""Messages between rank 0 and the others."""

from dataclasses import dataclass
from typing import TypeAlias

from inflight.contracts.config import EngineConfig
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.plan import StepPlan


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
