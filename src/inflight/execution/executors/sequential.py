"""`SequentialExecutor`: runs sequences one after another, each with the model's own cache.

The fallback, which works for every causal model. If a sequence's cache does not end where its span begins (a discarded
step, or a restarted sequence), it is rebuilt from the tokens. So no step needs undoing, and a model without a cache is
rerun for every token.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from inflight.contracts.step.cache_layout import ALL_TOKENS
from inflight.contracts.step.plan import Span
from inflight.execution.executors.interface import Capabilities
from inflight.execution.executors.rows import TokenHistory
from inflight.execution.hf.model_call import ModelCall
from inflight.execution.ragged_batch import RaggedBatch


@dataclass(slots=True)
class _OwnCache:
    """The model's cache of one sequence's first `length` tokens."""

    kept: Any
    length: int


class SequentialExecutor:
    """Runs a step's spans one by one.

    Args:
        model: ours alone, in evaluation mode, with an attention implementation of its own.
        in_one_piece: whether prompts only run whole, because the model cannot go on with several tokens at once.
        uses_cache: whether the model has a cache; if not, a sequence is rerun for every token.
    """

    name = "sequential"
    cache_groups = (ALL_TOKENS,)
    bytes_per_slot = bytes_per_state = 0

    def __init__(self, model: PreTrainedModel, *, in_one_piece: bool = False, uses_cache: bool = True) -> None:
        self.model = model
        self.in_one_piece = in_one_piece
        self._call = ModelCall(model, uses_cache=uses_cache)
        self._history = TokenHistory()
        self._caches: dict[int, _OwnCache] = {}

    @property
    def capabilities(self) -> Capabilities:
        """See `Executor`."""
        return Capabilities(shares_prefixes=False, chunks_prompts=not self.in_one_piece)

    def bytes_per_block(self, block_size: int) -> int:
        """See `Executor`. The size of the model's own caches is unknown."""
        return 0

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """See `Executor`. The model allocates its own caches."""
        self._caches.clear()

    def release(self, slots: Iterable[int]) -> None:
        """See `Executor`."""
        slots = list(slots)
        self._history.release(slots)
        for slot in slots:
            self._caches.pop(slot, None)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """See `Executor`."""
        wanted = [logits for span in batch.spans if (logits := self._run(span)) is not None]
        return torch.cat(wanted) if wanted else self._call.no_logits

    def _run(self, span: Span) -> torch.Tensor | None:
        """A span's logits `[num_logit_rows, V]`, if any."""
        self._history.add(span)
        is_whole = span.start == 0
        if is_whole:
            self._caches.pop(span.slot, None)  # the sequence starts over
        if self.in_one_piece and span.num_logit_rows == 0:
            return None  # held back until its last chunk comes
        own = self._caches.pop(span.slot, None)
        can_go_on = own is not None and own.length == span.start and (span.length == 1 or not self.in_one_piece)
        if is_whole or not can_go_on:
            own, span = None, self._history.from_the_beginning(span)
        outputs = self._call.outputs(
            [span.token_ids],
            None,  # the model counts positions by itself
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
