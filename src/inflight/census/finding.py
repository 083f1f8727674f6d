"""`Finding`: the census result of one class. Plain data."""

import json
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from inflight.contracts.api.errors import ModelError

Outcome: TypeAlias = Literal["exact", "wrong", "refused", "failed", "not causal", "not built"]
"""For a decoder-only causal LM: "exact": every token is the plain model's; "wrong": some are not; "refused": the engine
does not take the model; "failed": an error, a crash or no answer. Otherwise: "not causal": the class is not a
decoder-only causal LM; "not built": no tiny model of it could be made."""

MAX_REASON = 1200

MIN_SHARE, MIN_DISTINCT = 0.4, 8
"""The share of argmaxes that distant context must change, and the least number of distinct greedy tokens, for a
meaningful exact result."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table.

    Attributes:
        executor: the executor that the engine chose: "packed", "rows", "sequential" or "generate"; None: none.
        reason: why the class is not exact, in one line; for an exact class, what limits the result, or "".
        num_parameters: parameters of the tiny model; 0: there was no model.
        share_changed: the share of the plain model's argmaxes that other tokens far back change: how much context
            matters to the model.
        num_distinct: distinct tokens among some greedy tokens of the plain model: how varied its output is.
        factor: the factor by which the model's matrices were scaled.
        num_tokens: tokens that were generated and compared.
        num_near_ties: compared tokens that were not the argmax, but as good within the tolerance.
        num_preemptions: preemptions during the run.
        in_one_piece: whether prompts had to be computed whole.
        is_recorded: whether its forward pass was recorded, and runs without Python.
        seconds: the total time, without imports.
        takes: what the class reads, besides text: "image", "audio", "video".
        peer: the result of `transformers`' own continuous batching: "right", "wrong …", "raises …"; "": not run.
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
    is_recorded: bool = False
    seconds: float = 0.0
    takes: str = ""
    peer: str = ""

    def to_json(self) -> str:
        """Return the finding as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Finding":
        """Read a line that `to_json` wrote."""
        return cls(**json.loads(line))


def first_line(error: BaseException | str) -> str:
    """Return an error's first lines, with its type unless it is a `ValueError` or a `ModelError`."""
    is_ours = isinstance(error, str) or type(error) in (ValueError, ModelError)
    lines = [line.strip() for line in str(error).strip().splitlines()[:2]]
    text = " ".join(lines if is_ours else [f"{type(error).__name__}:", *lines])
    if isinstance(error, BaseException) and error.__cause__ is not None and not is_ours:
        text += f" (because of {first_line(error.__cause__)})"
    return shortened(text, MAX_REASON)


def shortened(text: str, limit: int) -> str:
    """Return at most `limit` characters of `text`."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
