"""`StepProfile`: where a decode step's time goes, as plain data; and how measured times become parts of a step.

Three kinds of steps are measured. Whole, undisturbed steps give the duration of a step, and the parts are scaled to add
up to it. Steps with a clock at each phase show how scheduler, packing, forward pass, sampler and engine share it. Steps
under torch's profiler show how the forward pass is divided, but the profiler slows small operators and Python a lot and
large operators hardly at all. So linear layers, experts and attention count as measured under the profiler, and small
operators and Python share the rest of a forward pass that ran without it.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from inflight.contracts.api.model_info import ModelInfo
from inflight.observe.pictures import write_file
from inflight.profiling.machine import Machine
from inflight.profiling.operators import LARGE, OperatorTimes, PhaseTimes
from inflight.profiling.work import StepWork

LEAST = 0.995
"""A time of at least this many floors counts as one that is not below its floor."""


def times(seconds: float, floor_seconds: float | None) -> float | None:
    """A time as a multiple of its floor. None without a floor, or below it: then the floor is wrong (the weights fit
    the CPU's caches, or the machine was busy during its measurement)."""
    ratio = seconds / floor_seconds if floor_seconds else 0.0
    return ratio if ratio >= LEAST else None


@dataclass(frozen=True, slots=True)
class ProfilePart:
    """A part of a step.

    Attributes:
        floor_seconds: the least time that the machine needs; None: there is no floor above 0.
    """

    name: str
    seconds: float
    floor_seconds: float | None = None

    @property
    def times_floor(self) -> float | None:
        """The part's time divided by its floor; see `times`."""
        return times(self.seconds, self.floor_seconds)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A decode step, divided into parts.

    Attributes:
        model: facts about the model, and how it runs.
        num_cached_tokens: cached tokens of each sequence, in the middle of the measurement.
        num_steps: measured steps of each of the three kinds.
        step_seconds: the median of whole steps.
        parts: the parts, whose seconds add up to `step_seconds`.
        correction: the factor that makes the parts' medians add up; far from 1 if the machine was busy with something
            else.
    """

    model: ModelInfo
    num_threads: int
    num_sequences: int
    num_cached_tokens: float
    num_steps: int
    step_seconds: float
    parts: tuple[ProfilePart, ...]
    correction: float
    machine: Machine
    work: StepWork

    @property
    def floor_seconds(self) -> float:
        """Seconds for reading weights and cache once."""
        return self.work.num_bytes / self.machine.read_bytes_per_second

    @property
    def times_floor(self) -> float | None:
        """A step's time divided by that of reading weights and cache once; see `times`."""
        return times(self.step_seconds, self.floor_seconds)

    @property
    def below_floor(self) -> list[str]:
        """The parts faster than their floor, which is thus invalid."""
        measured = [("the step", self.step_seconds, self.floor_seconds)]
        measured += [(part.name, part.seconds, part.floor_seconds or 0.0) for part in self.parts]
        return [name for name, seconds, floor in measured if floor and times(seconds, floor) is None]

    def share(self, part: ProfilePart) -> float:
        """Return the part's share of the step's time."""
        return part.seconds / self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """Return all fields and the values derived from them, for JSON."""
        parts = [{**asdict(part), "share": self.share(part), "times_floor": part.times_floor} for part in self.parts]
        return {
            **asdict(self),
            "parts": parts,
            "floor_seconds": self.floor_seconds,
            "times_floor": self.times_floor,
        }

    def write_json(self, path: Path) -> None:
        """Write the profile to a file. Raises `ValueError` if it cannot be written."""
        write_file(path, json.dumps(self.as_dict(), indent=2).encode() + b"\n")


def take_apart(
    step_seconds: float,
    phases: Sequence[PhaseTimes],
    operators: Sequence[OperatorTimes],
    machine: Machine,
    work: StepWork,
) -> tuple[tuple[ProfilePart, ...], float]:
    """Return the parts of a step, and the correction that makes them add up to `step_seconds`.

    Args:
        phases: times of steps with a clock at each phase.
        operators: times of steps under the profiler.
    """
    phase, operator = _medians(phases), _medians(operators)
    forward = split_forward(phase["forward"], operator)
    linear_floor = max(
        work.weight_bytes / machine.read_bytes_per_second, work.linear_operations / machine.operations_per_second
    )
    expert_floor = work.expert_bytes / machine.read_bytes_per_second
    parts = (
        ProfilePart("linears", forward["linears"], linear_floor),
        *([ProfilePart("experts", forward["experts"], expert_floor)] if forward["experts"] else []),
        ProfilePart("attention", forward["attention"], work.cache_bytes / machine.read_bytes_per_second),
        ProfilePart("small operators", forward["small_operators"]),
        ProfilePart("Python in the forward pass", forward["python"]),
        ProfilePart("packing the batch", phase["packing"]),
        ProfilePart("sampler", phase["sampler"]),
        ProfilePart("scheduler", phase["scheduler"]),
        ProfilePart("engine, other", phase["engine"]),
    )
    correction = step_seconds / sum(part.seconds for part in parts)
    return tuple(ProfilePart(part.name, part.seconds * correction, part.floor_seconds) for part in parts), correction


def split_forward(seconds: float, operators: dict[str, float]) -> dict[str, float]:
    """Divide a forward pass that ran without the profiler, by the operator times of one that ran under it (see above).

    If large operators alone took longer, there was a disturbance, and all times are scaled alike."""
    large = sum(operators[name] for name in LARGE)
    rest = operators["small_operators"] + operators["python"]
    if large >= seconds:
        return {name: value * seconds / (large + rest) for name, value in operators.items()}
    scale = min(1.0, (seconds - large) / rest)
    split = {**operators, **{name: operators[name] * scale for name in ("small_operators", "python")}}
    correction = seconds / sum(split.values())
    return {name: value * correction for name, value in split.items()}


def _medians(times: Sequence[PhaseTimes] | Sequence[OperatorTimes]) -> dict[str, float]:
    names = [field.name for field in fields(times[0])]
    return {name: statistics.median(getattr(each, name) for each in times) for name in names}
