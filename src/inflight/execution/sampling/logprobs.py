"""Log-probabilities of sampled tokens and of prompt tokens, by the model's unadjusted logits."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from inflight.contracts.api.outputs import TokenScore
from inflight.contracts.step.plan import SlotAssignment
from inflight.execution.ragged_batch import IntArray, RaggedBatch, to_device
from inflight.execution.sampling.sampler import pick

ROWS_AT_ONCE = 256
"""Rows of logits that are copied to float32 at a time."""


class Scorer:
    """Scores the rows whose requests want log-probabilities, each with the requested number of likeliest tokens.

    Args:
        max_num_seqs: number of slots.

    Attributes:
        is_needed: whether any sequence with a slot wants scores.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._num_top = np.full(max_num_seqs, -1, dtype=np.int64)
        self._num_prompt_top = np.full(max_num_seqs, -1, dtype=np.int64)
        self.is_needed = False

    def assign(self, assignment: SlotAssignment) -> None:
        """Track a slot assignment."""
        params = assignment.params
        self._set(assignment.slot, params.logprobs, params.prompt_logprobs)

    def release(self, slots: Iterable[int]) -> None:
        """Clear these slots."""
        for slot in slots:
            self._set(slot, None, None)

    def _set(self, slot: int, num_top: int | None, num_prompt_top: int | None) -> None:
        self._num_top[slot] = -1 if num_top is None else num_top
        self._num_prompt_top[slot] = -1 if num_prompt_top is None else num_prompt_top
        self.is_needed = bool((self._num_top >= 0).any() or (self._num_prompt_top >= 0).any())

    @torch.inference_mode()
    def score(self, logits: torch.Tensor, batch: RaggedBatch, token_ids: Sequence[int]) -> dict[int, TokenScore]:
        """The scores of the tokens of `logits`' rows `[R, V]`, in the model's dtype, by row, where requested.

        Args:
            token_ids: the R tokens, or `INVALID_TOKEN`.
        """
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
    """The scores of `token_ids` `[N]` in `rows` `[N]` of `logits` `[R, V]`, each with its `num_top` `[N]` likeliest.
    Logits are in the model's dtype, all else int64."""
    scored = pick(logits, to_device(rows, logits.device)).float()
    logprobs = torch.log_softmax(scored, dim=-1)  # logsumexp has other bits for a single row, which threads divide
    chosen = to_device(token_ids, logits.device)[:, None]
    ranks = (scored > scored.gather(-1, chosen)).sum(dim=-1) + 1
    columns = (logprobs.gather(-1, chosen)[:, 0].tolist(), ranks.tolist(), _likeliest(scored, logprobs, num_top))
    return [TokenScore(logprob, rank, *top) for logprob, rank, top in zip(*columns, strict=True)]


def _likeliest(scored: torch.Tensor, logprobs: torch.Tensor, num_top: IntArray) -> list[tuple[list[int], list[float]]]:
    """For each row of `scored` `[N, V]` its `num_top` `[N]` likeliest tokens, best first, and their log-probabilities.

    Of equally likely tokens those with lower ids come first. (`topk`'s choice among them depends on k, and so on other
    rows of the step.)

    Args:
        logprobs: `[N, V]`, of `scored`.
    """
    most = min(int(num_top.max()), scored.shape[-1])
    if most < 1:
        return [([], [])] * len(num_top)
    last = to_device(num_top.clip(1, most) - 1, scored.device)[:, None]
    threshold = torch.topk(scored, most, dim=-1).values.gather(-1, last)
    candidate_rows, candidate_ids = (scored >= threshold).nonzero(as_tuple=True)  # by row, then by id
    order = torch.argsort(scored[candidate_rows, candidate_ids], descending=True, stable=True)
    order = order[torch.argsort(candidate_rows[order], stable=True)]
    candidate_rows, candidate_ids = candidate_rows[order], candidate_ids[order]
    candidates = logprobs[candidate_rows, candidate_ids].tolist()
    ids, top, first = candidate_ids.tolist(), [], 0
    for number, count in zip(
        num_top.tolist(), torch.bincount(candidate_rows, minlength=len(num_top)).tolist(), strict=True
    ):
        end = first + min(number, count)
        top.append((ids[first:end], candidates[first:end]))
        first += count
    return top
