"""`RowsExecutor`: spans as rows of batches, with the model's own attention code, over a paged cache.

For models that do their attention themselves, or have recurrent states: the model finds keys and values of each row's
sequence in a cache of `transformers`' form (`paged_cache`), padded on the left, with a mask; and states by slot. All
spans of one token run in one batch, so that decodes share the reading of weights; a longer span runs alone. The order
of spans is kept, so a span may count on blocks that one before it writes.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from inflight.errors import ModelError
from inflight.execution.executors.model_call import ModelCall
from inflight.execution.executors.paged_cache import PagedCache, Rows, bytes_of, check_layers, places_of
from inflight.execution.executors.spans import RunnableSpan, TokensBySlot, spans_of
from inflight.execution.ragged_batch import RaggedBatch, to_device


class RowsExecutor:
    """Runs a step's spans as batches of rows.

    Args:
        model: ours alone, in evaluation mode, with an attention implementation of its own.
        block_size, num_slots: of the cache.
        in_one_piece: whether prompts are only run whole: the model can not go on with several tokens at once.

    Raises:
        ModelError: its cache holds something else than keys, values and states.
    """

    name = "rows"

    def __init__(self, model: PreTrainedModel, block_size: int, num_slots: int, *, in_one_piece: bool = False) -> None:
        self.model = model
        self.block_size = block_size
        self.num_slots = num_slots
        self.in_one_piece = in_one_piece
        self._call = ModelCall(model)
        self._like = self._own_cache()
        self._cache = PagedCache(self._like, 1, 1)
        self._tokens = TokensBySlot()
        self._num_run: dict[int, int] = {}  # tokens of each slot's sequence

    @property
    def can_share_prefixes(self) -> bool:
        """See `Executor`. What a state has seen is nobody else's."""
        return not self._cache.has_states

    @property
    def bytes_per_slot(self) -> int:
        """Memory that a slot takes, whatever its sequence's length."""
        return bytes_of(self._like)[1]

    def bytes_per_block(self, block_size: int) -> int:
        """See `Executor`."""
        return block_size * bytes_of(self._like)[0]

    def allocate(self, num_blocks: int) -> None:
        """See `Executor`."""
        self._cache = PagedCache(self._like, num_blocks * self.block_size, self.num_slots)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, copies: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
        """See `Executor`."""
        if copies:
            self._cache.copy(*places_of(copies, self.block_size))
        logits = [self._run(group, batch) for group in self._groups(batch)]
        wanted = [each for each in logits if len(each)]
        return torch.cat(wanted) if wanted else self._call.no_logits

    def _groups(self, batch: RaggedBatch) -> Iterator[list[RunnableSpan]]:
        """Spans that run together: neighbours of one token each, all of them with something before it, or none."""
        group: list[RunnableSpan] = []
        for span in spans_of(batch):
            if self.in_one_piece:
                self._tokens.add(span)
                if span.length > 1 and span.num_logit_rows == 0:
                    continue  # the rest is still to come
                if span.start > 0 and (span.length > 1 or self._num_run.get(span.slot) != span.start):
                    span = self._tokens.whole(span)
            if group and (span.length > 1 or group[-1].length > 1 or (span.start == 0) != (group[-1].start == 0)):
                yield group
                group = []
            group.append(span)
        if group:
            yield group

    def _run(self, group: list[RunnableSpan], batch: RaggedBatch) -> torch.Tensor:
        """The wanted logits `[R, V]` of spans that are equally long."""
        rows = self._rows(group, batch)
        num_tokens = group[0].length
        columns = np.arange(rows.num_keys)
        mask = columns >= rows.num_keys - rows.ends[:, None] if self._cache.has_keys else None
        self._cache.enter(rows)
        most_logits = max(span.num_logit_rows for span in group)
        logits = self._call(
            np.stack([span.token_ids for span in group]),
            rows.starts[:, None] + np.arange(num_tokens),
            mask,
            self._cache,
            most_logits,
        )
        self._cache.leave(rows)
        self._num_run.update((span.slot, span.end) for span in group)
        wanted = [logits[place, most_logits - span.num_logit_rows :] for place, span in enumerate(group)]
        return torch.cat(wanted) if most_logits else self._call.no_logits

    def _rows(self, group: list[RunnableSpan], batch: RaggedBatch) -> Rows:
        starts, ends = (np.array([getattr(span, name) for span in group]) for name in ("start", "end"))
        num_keys = int(ends.max())
        positions = np.maximum(np.arange(num_keys) - (num_keys - ends)[:, None], 0)
        tables = batch.groups[0].block_tables_host[[span.number for span in group]].astype(np.int64)
        blocks = np.take_along_axis(tables, positions // self.block_size, axis=1)
        gathered = blocks * self.block_size + positions % self.block_size
        device = self.model.device
        return Rows(
            sequence_ids=batch.sequence_ids_host[[span.number for span in group]],
            slots=np.array([span.slot for span in group]),
            starts=starts,
            ends=ends,
            kv_slots=to_device(gathered[:, num_keys - group[0].length :].ravel(), device),
            gathered=to_device(gathered, device),
            num_keys=num_keys,
        )

    @torch.inference_mode()
    def _own_cache(self) -> DynamicCache:
        """The model's own cache after some tokens, which shows what it keeps. Raises `ModelError`."""
        tokens, reasons = np.array([[1, 2]]) % self._call.vocab_size, list[str]()
        for config in (self.model.config, None):  # some configurations count other layers than the decoder's
            try:
                cache = DynamicCache(config=config)
                check_layers(cache)
                self._call(tokens, np.arange(2)[None], None, cache, 1)
                return cache
            except ModelError:
                raise
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
        raise ModelError(f"it does not run with a cache: {reasons[0]}")
