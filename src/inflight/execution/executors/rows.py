"""`RowsExecutor`: spans as rows of batches, with the model's own attention code, over a paged cache.

For models that do their attention themselves, or have recurrent states: the model finds keys and values of each row's
sequence in a cache of `transformers`' form (`paged_cache`), padded on the left, with a mask; and states by slot. All
spans of one token run in one batch, so that decodes share the reading of weights; beginnings of sequences that are
about equally long run together, padded on the left; any other span runs alone. What a span counts on is there before
it: beginnings count on nothing, all others keep their order.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from inflight.contracts.cache_layout import ALL_TOKENS
from inflight.contracts.errors import ModelError
from inflight.contracts.plan import Span
from inflight.execution.executors.whole_prompts import TokensBySlot
from inflight.execution.hf.model_call import ModelCall
from inflight.execution.hf.row_cache import PagedCache, Rows, bytes_of, check_layers, places_of
from inflight.execution.ragged_batch import RaggedBatch, to_device

MOST_PADDED = 1.5
"""How many times their tokens the places of rows may be that run together."""


def groups_of(spans: Iterable[Span], *, pads: bool) -> Iterator[list[Span]]:
    """Spans that run together, in an order in which each finds what it counts on."""
    beginnings: list[Span] = []
    others: list[Span] = []
    for span in spans:
        (beginnings if span.start == 0 else others).append(span)
    beginnings.sort(key=lambda span: span.length)

    def fits(span: Span, group: list[Span]) -> bool:
        if span.start > 0:
            return span.length == group[-1].length == 1
        num_tokens = sum(each.length for each in group) + span.length
        padded = span.length * (len(group) + 1)
        return padded == num_tokens or (pads and padded <= MOST_PADDED * num_tokens)

    for kind in (beginnings, others):
        group: list[Span] = []
        for span in kind:
            if group and not fits(span, group):
                yield group
                group = []
            group.append(span)
        if group:
            yield group


class RowsExecutor:
    """Runs a step's spans as batches of rows.

    Args:
        model: ours alone, in evaluation mode, with an attention implementation of its own.
        block_size, num_slots: of the cache.
        in_one_piece: whether prompts are only run whole: the model cannot go on with several tokens at once.
        pads: whether beginnings of different lengths run together.

    Raises:
        ModelError: its cache holds something else than keys, values and states.
    """

    name = "rows"
    cache_groups = (ALL_TOKENS,)

    def __init__(
        self,
        model: PreTrainedModel,
        block_size: int,
        num_slots: int,
        *,
        in_one_piece: bool = False,
        pads: bool = True,
    ) -> None:
        self.model = model
        self.pads = pads
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
        """See `Executor`. What a state has seen is nobody else's; and what is run whole has to be known from its first
        token on."""
        return not self._cache.has_states and not self.in_one_piece

    @property
    def bytes_per_slot(self) -> int:
        """See `Executor`."""
        return bytes_of(self._like)[1]

    def bytes_per_block(self, block_size: int) -> int:
        """See `Executor`. Twice its keys and values: those of sequences that decode are kept gathered as well."""
        return 2 * block_size * bytes_of(self._like)[0]

    def allocate(self, num_blocks: int) -> None:
        """See `Executor`."""
        self._cache = PagedCache(self._like, num_blocks * self.block_size, self.num_slots)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, copies: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
        """See `Executor`."""
        if copies:
            self._cache.copy(*places_of(copies, self.block_size))
        logits: dict[int, torch.Tensor] = {}
        for group in groups_of(self._runnable(batch), pads=self.pads):
            self._run(group, batch, logits)
        wanted = [logits[span.sequence_id] for span in batch.spans if span.sequence_id in logits]
        return torch.cat(wanted) if wanted else self._call.no_logits

    def _runnable(self, batch: RaggedBatch) -> Iterator[Span]:
        """What is to be run of a step."""
        for span in batch.spans:
            if not self.in_one_piece:
                yield span
                continue
            self._tokens.add(span)
            if span.start == 0:
                self._num_run.pop(span.slot, None)  # whose slot it was before
            if span.length > 1 and span.num_logit_rows == 0:
                continue  # the rest is still to come
            can_go_on = span.start == 0 or (span.length == 1 and self._num_run.get(span.slot) == span.start)
            yield span if can_go_on else self._tokens.whole(span)

    def _run(self, group: list[Span], batch: RaggedBatch, logits: dict[int, torch.Tensor]) -> None:
        """Run spans together; adds the wanted logits `[num_logit_rows, V]` of each, by sequence id."""
        rows = self._rows(group, batch)
        columns, padding = np.arange(rows.num_keys), rows.num_keys - rows.ends[:, None]
        needs_mask = self._cache.has_keys or rows.tokens is not None
        token_ids = np.zeros((len(group), rows.num_new), dtype=np.int64)
        for row, span in zip(token_ids, group, strict=True):
            row[rows.num_new - span.length :] = span.token_ids
        self._cache.enter(rows)
        most_logits = max(span.num_logit_rows for span in group)
        given = self._call(
            token_ids,
            np.maximum(columns - padding, 0)[:, rows.num_past :],
            columns >= padding if needs_mask else None,
            self._cache,
            most_logits,
        )
        self._cache.leave(rows)
        for place, span in enumerate(group):
            self._num_run[span.slot] = span.end
            if span.num_logit_rows:
                logits[span.sequence_id] = given[place, most_logits - span.num_logit_rows :]

    def _rows(self, group: list[Span], batch: RaggedBatch) -> Rows:
        starts, ends = (np.array([getattr(span, name) for span in group]) for name in ("start", "end"))
        num_keys = int(ends.max())
        positions = np.maximum(np.arange(num_keys) - (num_keys - ends)[:, None], 0)
        places = {span.sequence_id: place for place, span in enumerate(batch.spans)}
        sequence_ids = np.array([span.sequence_id for span in group])
        tables = batch.groups[0].block_tables_host[[places[each] for each in sequence_ids.tolist()]].astype(np.int64)
        blocks = np.take_along_axis(tables, positions // self.block_size, axis=1)
        gathered = blocks * self.block_size + positions % self.block_size
        device, num_new = self.model.device, max(span.length for span in group)
        kv_slots, tokens = gathered[:, num_keys - num_new :].ravel(), None
        if any(span.length < num_new for span in group):
            tokens = np.flatnonzero(np.arange(num_new) >= num_new - (ends - starts)[:, None])
            kv_slots = kv_slots[tokens]
        return Rows(
            sequence_ids=sequence_ids,
            slots=np.array([span.slot for span in group]),
            starts=starts,
            ends=ends,
            num_new=num_new,
            tokens=None if tokens is None else to_device(tokens, device),
            kv_slots=to_device(kv_slots, device),
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
