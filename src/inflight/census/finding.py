"""`Finding`: what the census found out about one class. Plain data."""

import json
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from inflight.contracts.errors import ModelError

Outcome: TypeAlias = Literal["exact", "wrong", "refused", "failed", "not causal", "not built"]
"""Of a decoder-only causal LM: every token is the plain model's; some are not; the engine does not take the model; an
error, a crash or no answer. "not causal": it is none. "not built": no tiny model of it could be made."""

MAX_REASON = 1200

MIN_SHARE, MIN_DISTINCT = 0.4, 8
"""Of argmaxes, that the far context must change; of greedy tokens. With less, an exact result says less."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table.

    Attributes:
        executor: that the engine chose: "packed", "rows" or "sequential"; None: none.
        reason: why it is not exact, in a line; of an exact one, what limits what that says, or nothing.
        num_parameters: of the tiny model; 0 if there was none.
        share_changed: of the plain model's argmaxes, by other tokens far back: how much its context matters to it.
        num_distinct: of some greedy tokens of the plain model: how varied its output is.
        factor: of its matrices.
        num_tokens: generated and compared.
        num_near_ties: of these, tokens that were not the argmax, but as good within the tolerance.
        num_preemptions: that happened meanwhile.
        in_one_piece: whether prompts had to be computed whole.
        seconds: that all of it took, without imports.
        peer: what `transformers`' own continuous batching did: "right", "wrong …", "raises …"; "" if not asked.
    """

    model_type: str
    model_class: str
    outcome: Outcome
    executor: str | None = None
    reason: str = ""
    num_parameters: int = 0
    share_changed: float = 0.0
    num_distinct: int = 0
    factor: float = 0.0
    num_tokens: int = 0
    num_near_ties: int = 0
    num_preemptions: int = 0
    in_one_piece: bool = False
    seconds: float = 0.0
    peer: str = ""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Finding":
        """What `to_json` gave."""
        return cls(**json.loads(line))


def first_line(error: BaseException | str) -> str:
    """The first lines of an error that say something, with its type unless it is a `ValueError` of ours or Python's."""
    is_ours = isinstance(error, str) or type(error) in (ValueError, ModelError)
    lines = [line.strip() for line in str(error).strip().splitlines()[:2]]
    text = " ".join(lines if is_ours else [f"{type(error).__name__}:", *lines])
    if isinstance(error, BaseException) and error.__cause__ is not None and not is_ours:
        text += f" (because of {first_line(error.__cause__)})"
    return shortened(text, MAX_REASON)


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters of it."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
