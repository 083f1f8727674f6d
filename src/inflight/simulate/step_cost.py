"""`StepCost`: a step's time as a function of its load: a model of a machine, independent of the scheduler.

    seconds = tokens(T) + per_logit_row * R + per_context_token * C + per_attended_key * K

T tokens go through the layers and R rows through the output head and the sampler. The spans' contexts, C tokens in all,
are read from the cache once, and K is the number of keys that all tokens together attend to: for a decode C and K are
equal, for a prefill K grows with the square. If nothing more is known, `tokens` is a straight line (fixed + per_token *
T). Measured costs bend: on a CPU one row is a matrix-vector product, bound by memory, and four rows hardly cost more
than three. So `tokens` is a line through knots; beyond the last knot it continues with the slope of the last segment.

Fits a `StepCost` to the steps of recordings: non-negative least squares on relative errors, without outliers.

If the engine has work left, a step lasts until the next one starts, so that the caller's time between steps counts.
Decides where the knots are: at powers of two, as far as there were steps between them.
"""

import bisect
import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from inflight.contracts.api.options import check, refuse_unknown_options
from inflight.contracts.step.record import StepRecord
from inflight.observe.recorder import Recording

ROUNDS = 8
FARTHEST = 4.0
"""A step is an outlier, disturbed by other programs, if its relative error exceeds this multiple of the median."""

SMALLEST_SPREAD, SMALLEST_SECONDS = 1e-9, 1e-9

Matrix = npt.NDArray[np.float64]


RATES = ("per_logit_row", "per_context_token", "per_attended_key")


class StepLoad(NamedTuple):
    """The load of a step: the four numbers that its cost depends on."""

    num_tokens: int
    num_logit_rows: int
    num_context_tokens: int
    num_attended_keys: int

    @classmethod
    def from_spans(cls, spans: Iterable[tuple[int, int, int]]) -> "StepLoad":
        """Return the load of spans given as (start, length, rows of logits)."""
        num_tokens = num_logit_rows = num_context_tokens = num_attended_keys = 0
        for start, length, num_rows in spans:
            num_tokens += length
            num_logit_rows += num_rows
            num_context_tokens += start + length
            num_attended_keys += length * start + length * (length + 1) // 2
        return cls(num_tokens, num_logit_rows, num_context_tokens, num_attended_keys)


class Cost(Protocol):
    """Predicts step times."""

    def seconds(self, load: StepLoad) -> float:
        """Return the seconds of a step with this load."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of steps, in seconds; `parse` checks a user's input.

    Attributes:
        knots: (tokens, seconds) by increasing tokens, at least two.
        per_logit_row: seconds for each sequence that gets a token.
        per_context_token: seconds for each token that a span has or finds in the cache.
        per_attended_key: seconds for each pair of a token and a key that it attends to.
    """

    knots: tuple[tuple[int, float], ...]
    per_logit_row: float = 0.0
    per_context_token: float = 0.0
    per_attended_key: float = 0.0

    @classmethod
    def linear(cls, fixed: float, per_token: float, **rates: float) -> "StepCost":
        """Return a cost of `fixed` seconds per step, `per_token` for each token, and the given rates."""
        return cls(((0, fixed), (1, fixed + per_token)), **rates)

    @classmethod
    def parse(cls, text: str) -> "StepCost":
        """Parse a JSON object with the attributes of `StepCost` or the arguments of `linear`. Raises `ValueError`."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the step cost is {text!r}, which is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(
                f"the step cost is {values!r}; it must be an object with fixed and per_token, or with knots"
            )
        needed = ("knots",) if "knots" in values else ("fixed", "per_token")
        refuse_unknown_options(values, (*needed, *RATES), "the step cost")
        for name in needed:
            if name not in values:
                raise ValueError(f"the step cost lacks {name!r}")
        for name in values.keys() - {"knots"}:
            check(name, values[name], Annotated[float, Meta(ge=0, le=1e9, description="seconds, at least 0")])
        if "knots" not in values:
            return cls.linear(**values)
        return cls(_knots(values["knots"]), **{name: values[name] for name in RATES if name in values})

    def as_dict(self) -> dict[str, Any]:
        """Return the cost for JSON, in the form that `parse` reads."""
        return asdict(self)

    def seconds(self, load: StepLoad) -> float:
        """Return the seconds of a step with this load."""
        knots = self.knots
        after = min(max(bisect.bisect_left(knots, (load.num_tokens,)), 1), len(knots) - 1)
        (tokens, seconds), (next_tokens, next_seconds) = knots[after - 1], knots[after]
        return (
            seconds
            + (next_seconds - seconds) * (load.num_tokens - tokens) / (next_tokens - tokens)
            + self.per_logit_row * load.num_logit_rows
            + self.per_context_token * load.num_context_tokens
            + self.per_attended_key * load.num_attended_keys
        )


def _knots(values: Any) -> tuple[tuple[int, float], ...]:
    try:
        knots = tuple((int(tokens), float(seconds)) for tokens, seconds in values)
    except (TypeError, ValueError):
        knots = ()
    tokens, seconds = [knot[0] for knot in knots], [knot[1] for knot in knots]
    if len(knots) < 2 or tokens != sorted(set(tokens)) or seconds != sorted(seconds) or seconds[0] < 0:
        raise ValueError(f"knots is {values!r}; it must be two or more pairs of tokens and seconds, both rising")
    return knots


NOTHING = StepLoad(0, 0, 0, 0)


def fit_cost(recordings: Sequence[Recording]) -> StepCost:
    """Return the cost that fits all steps of the recordings best.

    Raises `ValueError` unless the steps have at least two different numbers of tokens.
    """
    steps = [pair for recording in recordings for pair in timed_steps(recording.steps)]
    loads, seconds = [load_of(step) for step, _ in steps], np.array([seconds for _, seconds in steps])
    if len({load.num_tokens for load in loads}) < 2:
        raise ValueError("a step cost can only be fitted to steps of at least two different numbers of tokens")
    knots = choose_knots([load.num_tokens for load in loads])
    rates = np.array([load[1:] for load in loads], dtype=np.float64)
    design = np.hstack([_rises([load.num_tokens for load in loads], knots), rates])
    solution = _robust(design, seconds)
    levels = np.cumsum(solution[: len(knots)])
    return StepCost(
        tuple((tokens, float(level)) for tokens, level in zip(knots, levels, strict=True)),
        *(float(rate) for rate in solution[len(knots) :]),
    )


@dataclass(slots=True)
class WatchedCost:
    """A fitted cost that counts steps outside its data.

    Attributes:
        fewest_tokens, most: the range of recorded loads: the fewest tokens of a step, and the maximum of each load.
        largest: the maximum of each load that was asked for.
        num_steps, num_beyond: steps in all, and those outside that range.
    """

    cost: StepCost
    fewest_tokens: int
    most: StepLoad
    largest: StepLoad = NOTHING
    num_steps: int = 0
    num_beyond: int = 0

    @classmethod
    def fit(cls, cost: StepCost, recordings: Sequence[Recording]) -> "WatchedCost":
        """Watch a cost fitted to these recordings."""
        loads = [load_of(step) for recording in recordings for step in recording.steps]
        return cls(cost, min(load.num_tokens for load in loads), StepLoad(*map(max, zip(*loads, strict=True))))

    def seconds(self, load: StepLoad) -> float:
        """See `StepCost`."""
        self.num_steps += 1
        self.largest = StepLoad(*map(max, zip(self.largest, load, strict=True)))
        is_within = all(map(operator.le, load, self.most)) and load.num_tokens >= self.fewest_tokens
        self.num_beyond += not is_within
        return self.cost.seconds(load)

    @property
    def warning(self) -> str:
        """A sentence about extrapolated steps; empty if there were none."""
        if not self.num_beyond:
            return ""
        names = ("tokens", "rows of logits", "tokens of context", "attended keys")
        larger = [
            f"up to {asked:,} {name} ({recorded:,} recorded)"
            for name, asked, recorded in zip(names, self.largest, self.most, strict=True)
            if asked > recorded
        ] or [f"fewer than {self.fewest_tokens:,} tokens"]
        return (
            f"extrapolated: {self.num_beyond:,} of {self.num_steps:,} steps are beyond those that the cost was fitted "
            f"to: {', '.join(larger)}"
        )


def timed_steps(steps: Iterable[StepRecord]) -> list[tuple[StepRecord, float]]:
    """Return each step with its seconds: up to the next step's start if it left work to do, else its own duration."""
    steps = list(steps)
    timed = [
        (step, after.start_time - step.start_time if step.num_running + step.num_waiting else step.duration)
        for step, after in pairwise(steps)
    ]
    return timed + [(step, step.duration) for step in steps[-1:]]


def load_of(step: StepRecord) -> StepLoad:
    """Return the load of a recorded step."""
    return StepLoad.from_spans(
        (span.start, span.length, int(span.kind != "chunk") + span.num_draft_tokens) for span in step.spans
    )


def choose_knots(num_tokens: Sequence[int]) -> list[int]:
    """Return the fewest and most tokens seen, and each power of two between them with steps since the last knot."""
    seen = sorted(set(num_tokens))
    knots = [seen[0]]
    for exponent in range(seen[-1].bit_length()):
        candidate = 1 << exponent
        if candidate < seen[-1] and any(knots[-1] < tokens <= candidate for tokens in seen):
            knots.append(candidate)
    return [*knots, seen[-1]]


def _rises(num_tokens: Sequence[int], knots: Sequence[int]) -> Matrix:
    """Return `[steps, knots]`: 1 for the first knot's level, then each step's share of the rise to further knots."""
    tokens = np.array(num_tokens, dtype=np.float64)[:, None]
    low, high = np.array(knots[:-1], dtype=np.float64), np.array(knots[1:], dtype=np.float64)
    return np.hstack([np.ones_like(tokens), np.clip((tokens - low) / (high - low), 0.0, 1.0)])


def _robust(design: Matrix, seconds: Matrix) -> Matrix:
    """Solve `design [steps, columns]` for `seconds [steps]`: least squares on relative errors, repeated without
    outliers. Returns `[columns]`."""
    predicted, kept = seconds, np.ones(len(seconds), dtype=bool)
    for _ in range(ROUNDS):
        solution = _non_negative((design / predicted[:, None])[kept], (seconds / predicted)[kept])
        predicted = np.maximum(design @ solution, SMALLEST_SECONDS)
        errors = np.abs(seconds / predicted - 1.0)
        kept = errors <= FARTHEST * max(float(np.median(errors)), SMALLEST_SPREAD)
    return solution


def _non_negative(design: Matrix, target: Matrix) -> Matrix:
    """Solve `design [steps, columns]` for `target [steps]` by least squares, dropping the most negative coefficient
    until none is left. Returns `[columns]`."""
    scale = np.linalg.norm(design, axis=0)
    columns = [column for column in range(design.shape[1]) if scale[column] > 0]
    solution = np.zeros(design.shape[1])
    while columns:
        values = np.linalg.lstsq(design[:, columns] / scale[columns], target, rcond=None)[0]
        if values.min() >= 0:
            solution[columns] = values / scale[columns]
            break
        del columns[int(values.argmin())]
    return solution
