"""`StepCost`: a step's time as a function of its load: a model of a machine, independent of the scheduler.

    seconds = tokens(T) + per_logit_row * R + per_context_token * C + per_attended_key * K

T tokens go through the layers and R rows through the output head and the sampler. The spans' contexts, C tokens in all,
are read from the cache once, and K is the number of keys that all tokens together attend to: for a decode C and K are
equal, for a prefill K grows with the square. If nothing more is known, `tokens` is a straight line (fixed + per_token *
T). Measured costs bend: on a CPU one row is a matrix-vector product, bound by memory, and four rows hardly cost more
than three. So `tokens` is a line through knots; beyond the last knot it continues with the slope of the last segment.
"""

import bisect
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple, Protocol

from msgspec import Meta

from inflight.contracts.options import check, refuse_unknown_options

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
