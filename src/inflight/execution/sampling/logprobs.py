"""Log-probabilities of chosen tokens and of prompt tokens, as the model gave them, before anything is changed.

Decides nothing about which tokens are chosen.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from inflight.contracts.outputs import TokenScore
from inflight.contracts.plan import SlotAssignment
from inflight.execution.ragged_batch import IntArray, RaggedBatch, to_device

ROWS_AT_ONCE = 256
"""At most so many rows of logits are copied to float32 at a time."""


class Scorer:
    """Scores the rows of a step whose requests ask for it, each with as many of the likeliest tokens as it asks for.

    Args:
        max_num_seqs: number of slots.

    Attributes:
        is_needed: whether any sequence that has a slot asks for scores.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._num_top = np.full(max_num_seqs, -1, dtype=np.int64)
        self._num_prompt_top = np.full(max_num_seqs, -1, dtype=np.int64)
        self.is_needed = False

    def assign(self, assignment: SlotAssignment) -> None:
        """A sequence has moved into a slot."""
        params = assignment.params
        self._set(assignment.slot, params.logprobs, params.prompt_logprobs)

    def release(self, slots: Iterable[int]) -> None:
        """The sequences in these slots want no scores any more."""
        for slot in slots:
            self._set(slot, None, None)

    def _set(self, slot: int, num_top: int | None, num_prompt_top: int | None) -> None:
        self._num_top[slot] = -1 if num_top is None else num_top
        self._num_prompt_top[slot] = -1 if num_prompt_top is None else num_prompt_top
        self.is_needed = bool((self._num_top >= 0).any() or (self._num_prompt_top >= 0).any())

    @torch.inference_mode()
    def score(self, logits: torch.Tensor, batch: RaggedBatch, token_ids: Sequence[int]) -> dict[int, TokenScore]:
        """The scores of the tokens of `logits`' rows `[R, V]`, by row, where a request asks for one."""
        slots = batch.logit_slots_host
        num_top = np.where(batch.logit_targets_host >= 0, self._num_prompt_top[slots], self._num_top[slots])
        rows = np.flatnonzero(num_top >= 0)
        scores: dict[int, TokenScore] = {}
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[first : first + ROWS_AT_ONCE]
            tokens = np.array([token_ids[row] for row in some], dtype=np.int64).clip(min=0)
            scores.update(zip(some.tolist(), score_rows(logits, some, tokens, num_top[some]), strict=True))
        return scores


def score_rows(logits: torch.Tensor, rows: IntArray, token_ids: IntArray, num_top: IntArray) -> list[TokenScore]:
    """The scores of `token_ids` `[N]` in `rows` `[N]` of `logits` `[R, V]`, each with its `num_top` `[N]` likeliest."""
    scored = logits[to_device(rows, logits.device)].float()
    normaliser = torch.logsumexp(scored, dim=-1, keepdim=True)
    own = scored.gather(-1, to_device(token_ids, logits.device)[:, None])
    ranks = (scored > own).sum(dim=-1) + 1
    top = torch.topk(scored, min(int(num_top.max()), scored.shape[-1]), dim=-1)
    columns = ((own - normaliser)[:, 0], ranks, top.indices, top.values - normaliser)
    return [
        TokenScore(logprob, rank, ids[:number], logprobs[:number])
        for logprob, rank, ids, logprobs, number in zip(
            *(column.tolist() for column in columns), num_top.tolist(), strict=True
        )
    ]
