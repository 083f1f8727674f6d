"""Adjustments of logits before sampling: bad words, `min_tokens`, biases, penalties.

Each sequence with adjustments has an `Adjuster`. All rows of a step are changed together, and only at the affected
tokens, never over the whole vocabulary. Knows no slot and no step. The repetition penalty is CTRL's (Keskar et al.,
2019), presence and frequency penalties are OpenAI's, with vLLM's meaning: the repetition penalty counts the prompt.
"""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from inflight.contracts.step.plan import SlotAssignment
from inflight.execution.ragged_batch import IntArray, to_device

FloatArray: TypeAlias = npt.NDArray[np.float32]


class Adjuster:
    """One sequence's adjustments, and the tokens that they depend on."""

    def __init__(self, assignment: SlotAssignment) -> None:
        params, token_ids, prompt_len = assignment.params, assignment.token_ids, assignment.prompt_len
        self._params = params
        self._prompt_len = prompt_len
        self._stop_token_ids = tuple(assignment.stop_token_ids)
        self._bad_words = assignment.bad_words
        self._bad_lengths = sorted(set(map(len, assignment.bad_words)))
        self._bias_ids = np.array(list(params.logit_bias or ()), dtype=np.int64)
        self._biases = np.array(list((params.logit_bias or {}).values()), dtype=np.float32)
        self._token_ids = array("q", token_ids)
        self._seen = SeenTokens(token_ids[:prompt_len], token_ids[prompt_len:]) if params.has_penalties else None

    def observe(self, position: int, token_id: int) -> None:
        """Set the sequence's last token, at this position. A different token seen there before was a rejected draft
        token; the same one is not counted twice."""
        is_known = position < len(self._token_ids) and self._token_ids[position] == token_id
        num_kept = position + is_known
        while len(self._token_ids) > num_kept:
            dropped = self._token_ids.pop()
            if self._seen is not None:
                self._seen.take_back(dropped)
        if not is_known:
            self._token_ids.append(token_id)
            if self._seen is not None:
                self._seen.add(token_id)

    def edits(self) -> "Edits | None":
        """The edits of the next token's logits; None: none."""
        params = self._params
        forbidden = self._ends_of_bad_words()
        if len(self._token_ids) - self._prompt_len < params.min_tokens:
            forbidden += self._stop_token_ids
        if self._seen is None:
            if not forbidden and not len(self._bias_ids):
                return None
            return Edits(np.array(forbidden, dtype=np.int64), self._bias_ids, self._biases)
        counts = self._seen.output_counts
        taken = counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
        return Edits(
            np.array(forbidden, dtype=np.int64),
            self._bias_ids,
            self._biases,
            self._seen.token_ids,
            np.full(len(counts), params.repetition_penalty, dtype=np.float32),
            taken.astype(np.float32),
        )

    def _ends_of_bad_words(self) -> list[int]:
        """The tokens that would complete a bad word."""
        forbidden: list[int] = []
        for length in self._bad_lengths:
            first = len(self._token_ids) - length
            if first < self._prompt_len:
                break
            forbidden += self._bad_words.get(tuple(self._token_ids[first:]), ())
        return forbidden


class Edits(NamedTuple):
    """Edits of one row of logits, each `[n]`.

    Attributes:
        forbidden: token ids to exclude, int64.
        biased, biases: token ids, int64, and the bias of each, float32.
        seen, factors, taken: token ids of the sequence, int64; the repetition penalty of each and the amount to
            subtract, float32.
    """

    forbidden: IntArray
    biased: IntArray
    biases: FloatArray
    seen: IntArray = np.empty(0, dtype=np.int64)
    factors: FloatArray = np.empty(0, dtype=np.float32)
    taken: FloatArray = np.empty(0, dtype=np.float32)


NO_EDITS = Edits(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))


class SeenTokens:
    """The distinct tokens of a sequence, and their counts in its output."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt))}
        self._num_in_prompt = len(self._places)
        self._ids = np.zeros(max(64, 2 * len(self._places)), dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.int64)
        self._ids[: len(self._places)] = list(self._places)
        for token_id in output:
            self.add(token_id)

    @property
    def token_ids(self) -> IntArray:
        """The distinct tokens of prompt and output, `[n]` int64."""
        return self._ids[: len(self._places)]

    @property
    def output_counts(self) -> IntArray:
        """Their counts in the output, `[n]` int64."""
        return self._counts[: len(self._places)]

    def add(self, token_id: int) -> None:
        """Count one more token of the output."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids, self._counts = (np.resize(each, 2 * len(each)) for each in (self._ids, self._counts))
            self._counts[place:] = 0
        self._ids[place] = token_id
        self._counts[place] += 1

    def take_back(self, token_id: int) -> None:
        """Undo the last `add`, which was of this token."""
        place = self._places[token_id]
        self._counts[place] -= 1
        if place >= self._num_in_prompt and not self._counts[place]:
            del self._places[token_id]  # the last one: it was added last


def adjust(logits: torch.Tensor, edits: Sequence[Edits]) -> None:
    """Change logits `[R, V]` float32 in place, one `Edits` for each row."""
    forbidden, biased, biases, seen, factors, taken = zip(*edits, strict=True)
    if (places := _places(forbidden, logits)) is not None:
        logits[places] = -torch.inf
    if (places := _places(biased, logits)) is not None:
        logits[places] += _joined(biases, logits)
    if (places := _places(seen, logits)) is not None:
        scores, factor = logits[places], _joined(factors, logits)
        logits[places] = torch.where(scores > 0, scores / factor, scores * factor) - _joined(taken, logits)


def _places(ids: Sequence[IntArray], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows `[n]` and columns `[n]`, int64, of the given tokens `[…]` of each row of logits `[R, V]`; None if there are
    none."""
    rows = np.repeat(np.arange(len(ids)), [len(each) for each in ids])
    if not len(rows):
        return None
    return to_device(rows, logits.device), _joined(ids, logits)


def _joined(values: Sequence[npt.NDArray[Any]], logits: torch.Tensor) -> torch.Tensor:
    """The values `[…]` of all rows, end to end: `[n]` of their dtype, on the logits' device."""
    return to_device(np.concatenate(values), logits.device)
