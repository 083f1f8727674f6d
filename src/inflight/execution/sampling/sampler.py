"""`Sampler`: from logits to tokens, for all rows of a step at once, each with its own parameters.

Parameters are kept by slot and looked up for the rows of a step. Rows with adjustments are copied and changed in
float32 (`adjustments.py`). Greedy rows cost one pass over the vocabulary; other rows are filtered and sorted only as
needed: on a CPU by our kernels, which sort little (`kernels/sample.cpp`), elsewhere by torch's operators. Random
numbers depend only on (seed, sequence index, output position), as in counter-based generators (Salmon et al., SC 2011):
preemption, chunking and other rows do not change them.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from inflight.contracts.step.plan import SlotAssignment
from inflight.execution.kernels import kernels_available
from inflight.execution.ragged_batch import IntArray, RaggedBatch, to_device
from inflight.execution.sampling.adjustments import NO_EDITS, Adjuster, Edits, adjust
from inflight.execution.sampling.torch_sampling import sample_with_torch


class TokenMasks(NamedTuple):
    """Masks for some rows of a step's logits: the rows, ascending, and int32 words `[len(rows), ceil(V / 32)]`."""

    rows: Sequence[int]
    words: npt.NDArray[np.int32]


def apply_mask(logits: torch.Tensor, mask: torch.Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place; NaN stays NaN.

    Looks up each byte of the mask as eight upper limits, without branches: a seventh of `masked_fill_`'s time.

    Args:
        logits: `[R, V]`, floating point.
        mask: int32 `[R, ceil(V / 32)]`, on the same device; a set bit is an allowed token, the lowest bit first.
    """
    bytes_ = mask.view(torch.uint8).int()  # the lowest byte first, as on every machine that torch runs on
    limits = torch.nn.functional.embedding(bytes_, _limits_of_byte(logits.dtype, logits.device)).flatten(1)
    torch.minimum(logits, limits[:, : logits.shape[-1]], out=logits)


@cache
def _limits_of_byte(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`[256, 8]`: for each byte and each of its bits, infinity if the bit is set, else -infinity."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits.bool(), torch.inf, -torch.inf).to(dtype=dtype, device=device)


MAX_TEMPERATURE = float(np.finfo(np.float32).max)
INVALID_TOKEN = -1
"""The token of a row whose logits are not finite."""


class Sampler:
    """Samples the next token of each logit row.

    Args:
        max_num_seqs: number of slots.
        device: where the logits will be.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.device = device
        self._temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs, dtype=np.float32)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self._seed = np.zeros(max_num_seqs, dtype=np.uint64)
        self._index = np.zeros(max_num_seqs, dtype=np.uint64)
        self._prompt_len = np.zeros(max_num_seqs, dtype=np.int64)
        self._adjusters: dict[int, Adjuster] = {}  # of slots that need one
        self._is_adjusted = np.zeros(max_num_seqs, dtype=np.bool_)  # whether it is needed

    def assign(self, assignment: SlotAssignment) -> None:
        """Track a slot assignment."""
        slot, params = assignment.slot, assignment.params
        self._temperature[slot] = min(params.temperature, MAX_TEMPERATURE)
        self._top_k[slot] = max(params.top_k, 0)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = assignment.seed
        self._index[slot] = assignment.index
        self._prompt_len[slot] = assignment.prompt_len
        self.release([slot])
        if params.changes_logits:
            self._is_adjusted[slot] = True
            self._adjusters[slot] = Adjuster(assignment)

    def release(self, slots: Iterable[int]) -> None:
        """Drop the adjustments of these slots."""
        for slot in slots:
            self._adjusters.pop(slot, None)
            self._is_adjusted[slot] = False

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: RaggedBatch, masks: TokenMasks | None = None) -> list[int]:
        """One token for each row of `logits` `[R, V]`, in the model's dtype, or `INVALID_TOKEN` where they are not
        finite; for rows that are only scored, their given token. This is the step's only transfer from the device.

        Args:
            masks: token masks of constrained rows.
        """
        scored = batch.logit_targets_host >= 0
        if not scored.any():
            return self._sample(logits, batch, np.arange(batch.num_logit_rows), masks)
        tokens, rows = batch.logit_targets_host.copy(), np.flatnonzero(~scored)
        tokens[rows] = self._sample(pick(logits, self._rows(rows)), batch, rows, masks)
        result: list[int] = tokens.tolist()
        return result

    def _sample(self, logits: torch.Tensor, batch: RaggedBatch, rows: IntArray, masks: TokenMasks | None) -> list[int]:
        """Tokens for `rows` `[N]` int64 of a batch, from their logits `[N, V]`."""
        if len(rows) == 0:
            return []
        slots = batch.logit_slots_host[rows]
        output_positions = batch.logit_positions_host[rows] + 1 - self._prompt_len[slots]
        edits = self._edits(batch, rows, slots)
        masked = np.searchsorted(rows, () if masks is None else masks.rows)
        adjusted = np.array(sorted({*edits, *masked.tolist()}) if edits or masks else (), dtype=np.int64)
        if len(adjusted) < len(rows):
            tokens = self._choose(logits, slots, output_positions)
        else:
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        if len(adjusted):
            selected = self._rows(adjusted)
            changed = pick(logits, selected).float()
            adjust(changed, [edits.get(place, NO_EDITS) for place in adjusted.tolist()])
            if masks is not None:
                at = self._rows(np.searchsorted(adjusted, masked))
                constrained = pick(changed, at)
                apply_mask(constrained, to_device(masks.words, self.device))
                changed[at] = constrained
            tokens[selected] = self._choose(changed, slots[adjusted], output_positions[adjusted])
        result: list[int] = tokens.tolist()
        return result

    def _edits(self, batch: RaggedBatch, rows: IntArray, slots: IntArray) -> dict[int, Edits]:
        """The edits of the logits of `rows` `[N]` int64, in `slots` `[N]` int64, by index into `rows`."""
        edits: dict[int, Edits] = {}
        for place in np.flatnonzero(self._is_adjusted[slots]).tolist():
            row, adjuster = rows[place], self._adjusters[int(slots[place])]
            adjuster.observe(int(batch.logit_positions_host[row]), int(batch.logit_token_ids_host[row]))
            if (wanted := adjuster.edits()) is not None:
                edits[place] = wanted
        return edits

    def _choose(self, logits: torch.Tensor, slots: IntArray, output_positions: IntArray) -> torch.Tensor:
        """Tokens `[N]` from logits `[N, V]`, in `slots` `[N]`, at `output_positions` `[N]`; all but the logits are
        int64."""
        tokens = best_tokens(logits)
        random_rows = np.flatnonzero(self._temperature[slots] > 0)
        if len(random_rows):
            rows = self._rows(random_rows)
            sampled = self._sample_rows(pick(logits, rows), slots[random_rows], output_positions[random_rows])
            tokens[rows] = torch.where(tokens[rows] == INVALID_TOKEN, INVALID_TOKEN, sampled)
        return tokens

    def _sample_rows(self, logits: torch.Tensor, slots: IntArray, output_positions: IntArray) -> torch.Tensor:
        """Sampled tokens `[N]` from logits `[N, V]` whose rows all have a temperature above 0; else see `_choose`."""
        uniform = counter_uniform(self._seed[slots], self._index[slots], output_positions.astype(np.uint64))
        filters = self._top_k[slots], self._top_p[slots], self._min_p[slots]
        by_row = (self._temperature[slots], *filters, uniform)
        if has_kernels(logits):
            tokens: torch.Tensor = torch.ops.inflight.sample(logits, *map(torch.from_numpy, by_row))
            return tokens
        return sample_with_torch(logits, *by_row)

    def _rows(self, rows: IntArray) -> torch.Tensor:
        """Row numbers `[n]` int64 on the device."""
        return to_device(rows, self.device)


def pick(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows `[n]` int64 of logits `[R, V]`, in their dtype: `[n, V]`. (On a CPU `logits[rows]` wakes torch's
    threads, which takes a millisecond.)"""
    return logits.index_select(0, rows)


def has_kernels(logits: torch.Tensor) -> bool:
    """Whether our kernels support these logits `[R, V]`: float32 or bfloat16, on a CPU."""
    return logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16) and kernels_available()


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The token of each row's greatest logit, `[R]` int64 from `[R, V]`, float; `INVALID_TOKEN` if it is infinite or
    any is NaN."""
    if has_kernels(logits):
        tokens: torch.Tensor = torch.ops.inflight.greedy(logits)
        return tokens
    best_logits, tokens = logits.max(dim=-1)
    return torch.where(best_logits.isfinite(), tokens, INVALID_TOKEN)


def counter_uniform(
    seed: npt.NDArray[np.uint64], index: npt.NDArray[np.uint64], position: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float32]:
    """Uniform numbers `[N]` float32 in [0, 1), each from three counters `[N]` uint64: SplitMix64's mixing (Steele et
    al., 2014), chained."""
    mixed = _mix(_mix(_mix(seed) ^ index) ^ position)
    return (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser, `[n]` uint64 to `[n]` uint64."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
