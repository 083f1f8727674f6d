"""`SequentialExecutor`: one sequence after the other, each with a cache of the model's own making.

The last resort, which every causal model takes. A cache that does not stand where a span begins (a step was given up,
the slot is another sequence's now, or there is none at all) is made anew from the sequence's tokens: so nothing has to
be taken back, and a model without any cache is run from the start every time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from inflight.contracts.cache_layout import ALL_TOKENS
from inflight.contracts.plan import Span
from inflight.execution.executors.whole_prompts import TokensBySlot
from inflight.execution.hf.model_call import ModelCall
from inflight.execution.ragged_batch import RaggedBatch


@dataclass(slots=True)
class _OwnCache:
    """What the model keeps of one sequence's first `length` tokens."""

    kept: Any
    length: int


class SequentialExecutor:
    """Runs a step's spans one by one.

    Args:
        model: ours alone, in evaluation mode, with an attention implementation of its own.
        in_one_piece: whether prompts are only run whole: the model cannot go on with several tokens at once.
        uses_cache: whether the model keeps anything; if not, a sequence is run from its beginning for every token.
    """

    name = "sequential"
    cache_groups = (ALL_TOKENS,)
    can_share_prefixes = False
    bytes_per_slot = 0

    def __init__(self, model: PreTrainedModel, *, in_one_piece: bool = False, uses_cache: bool = True) -> None:
        self.model = model
        self.in_one_piece = in_one_piece
        self._call = ModelCall(model, uses_cache=uses_cache)
        self._tokens = TokensBySlot()
        self._caches: dict[int, _OwnCache] = {}

    def bytes_per_block(self, block_size: int) -> int:
        """See `Executor`. How much the model's own caches take is not known."""
        return 0

    def allocate(self, num_blocks: int) -> None:
        """See `Executor`. The model makes room for itself."""
        self._caches.clear()

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, copies: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
        """See `Executor`."""
        wanted = [logits for span in batch.spans if (logits := self._run(span)) is not None]
        return torch.cat(wanted) if wanted else self._call.no_logits

    def _run(self, span: Span) -> torch.Tensor | None:
        """Its logits `[num_logit_rows, V]`, if any are wanted."""
        self._tokens.add(span)
        is_whole = span.start == 0
        if is_whole:
            self._caches.pop(span.slot, None)  # whose slot it was before
        if self.in_one_piece and span.num_logit_rows == 0:
            return None  # the rest is still to come
        own = self._caches.pop(span.slot, None)
        can_go_on = own is not None and own.length == span.start and (span.length == 1 or not self.in_one_piece)
        if is_whole or not can_go_on:
            own, span = None, self._tokens.whole(span)
        outputs = self._call.outputs(
            [span.token_ids],
            None,  # which positions these are is the model's own affair
            None,
            None if own is None else own.kept,
            max(1, span.num_logit_rows),
        )
        kept = self._call.cache_of(outputs)
        if kept is not None:
            self._caches[span.slot] = _OwnCache(kept, span.end)
        if not span.num_logit_rows:
            return None
        logits: torch.Tensor = outputs.logits[0]
        return logits[len(logits) - span.num_logit_rows :]
