"""What rank 0 and the others say to each other."""

from dataclasses import dataclass
from typing import TypeAlias

from inflight.contracts.config import EngineConfig
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.plan import StepPlan


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Where a rank runs, and meets the others in memory that they share.

    Attributes:
        file: the descriptor of the file, which the rank has inherited.
        lifeline: the descriptor of a pipe that ends with rank 0.
        cpus: where the rank may run.
    """

    file: int
    lifeline: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadShard:
    """The first message to a rank: what it is to load, which rank it is, of how many, and where they meet."""

    model: str
    config: EngineConfig
    number: int
    size: int
    place: RankPlacement


@dataclass(frozen=True, slots=True)
class RunStep:
    """A step to be computed. Its plan has no assignments: only rank 0 chooses tokens."""

    number: int
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has loaded its part."""

    info: ModelInfo


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank is about to end."""

    message: str


Message: TypeAlias = LoadShard | RunStep | Ready | RankFailed
