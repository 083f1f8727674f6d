"""`RowsExecutor`: spans as rows of batches, with the model's own attention code, over a paged cache.

For models that compute attention themselves, or have recurrent states. The model reads each row's keys and values from
a `transformers` cache (`RowCache`), padded on the left, with a mask; and states by slot. All spans of one token run as
one batch, so that decodes share the reading of weights. First spans of similar length run together, padded on the left;
any other span runs alone. Dependencies run first: first spans have none, and all others keep their order.

`TokenHistory`: the tokens of each slot's sequence, for executors that rerun sequences.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.contracts.step.cache_layout import ALL_TOKENS
from inflight.contracts.step.plan import Span
from inflight.execution.executors.interface import Capabilities
from inflight.execution.hf.model_call import ModelCall
from inflight.execution.hf.row_cache import CacheRows, RowCache, bytes_of, check_layers, indices_of_blocks
from inflight.execution.ragged_batch import IntArray, RaggedBatch, cache_indices, to_device


class TokenHistory:
    """The tokens of each slot's sequence so far."""

    def __init__(self) -> None:
        self._token_ids: dict[int, IntArray] = {}

    def add(self, span: Span) -> None:
        """Record a span's tokens, overwriting from its first position on."""
        known = self._token_ids.get(span.slot)
        if known is None or len(known) < span.end:
            grown = np.zeros(max(64, 2 * span.end), dtype=np.int64)
            if known is not None:
                grown[: len(known)] = known
            known = self._token_ids[span.slot] = grown
        known[span.start : span.end] = span.token_ids

    def from_the_beginning(self, span: Span) -> Span:
        """The span, extended to begin with the sequence's first token."""
        return replace(span, start=0, token_ids=self._token_ids[span.slot][: span.end].tolist())

    def release(self, slots: Iterable[int]) -> None:
        """Forget the sequences in these slots."""
        for slot in slots:
            self._token_ids.pop(slot, None)


MAX_PADDING_RATIO = 1.5
"""Rows that run together may have at most this many positions, padding included, for each token."""


def row_batches(spans: Iterable[Span], *, pads: bool) -> Iterator[list[Span]]:
    """Batches of spans, ordered by their dependencies."""
    beginnings: list[Span] = []
    others: list[Span] = []
    for span in spans:
        (beginnings if span.start == 0 else others).append(span)
    beginnings.sort(key=lambda span: span.length)

    def fits(span: Span, together: list[Span]) -> bool:
        if span.start > 0:
            return span.length == together[-1].length == 1
        num_tokens = sum(each.length for each in together) + span.length
        padded = span.length * (len(together) + 1)
        return padded == num_tokens or (pads and padded <= MAX_PADDING_RATIO * num_tokens)

    for kind in (beginnings, others):
        together: list[Span] = []
        for span in kind:
            if together and not fits(span, together):
                yield together
                together = []
            together.append(span)
        if together:
            yield together


class RowsExecutor:
    """Runs a step's spans as batches of rows.

    Args:
        model: exclusively ours, in evaluation mode, with its own attention implementation.
        block_size, num_slots: of the cache.
        in_one_piece: whether prompts must run whole, because the model cannot continue with several tokens at once.
        pads: whether first spans of different lengths run together.

    Raises:
        ModelError: the model's cache holds anything other than keys, values and states.
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
        if self._call.cache_name is None:
            raise ModelError("its forward takes no cache")
        self._like = self._own_cache()
        self._cache = RowCache(self._like, 1, 1)
        self._history = TokenHistory()
        self._num_run: dict[int, int] = {}  # tokens of each slot's sequence that have run

    @property
    def capabilities(self) -> Capabilities:
        """See `Executor`. Recurrent states cannot be shared; and a prompt that runs whole needs all its tokens."""
        return Capabilities(
            shares_prefixes=not self._cache.has_states and not self.in_one_piece,
            chunks_prompts=not self.in_one_piece,
        )

    @property
    def bytes_per_slot(self) -> int:
        """See `Executor`."""
        return bytes_of(self._like)[1]

    bytes_per_state = 0

    def bytes_per_block(self, block_size: int) -> int:
        """See `Executor`. Twice the keys and values: those of decoding sequences are also kept gathered."""
        return 2 * block_size * bytes_of(self._like)[0]

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """See `Executor`."""
        self._cache = RowCache(self._like, num_blocks * self.block_size, self.num_slots)

    def release(self, slots: Iterable[int]) -> None:
        """See `Executor`."""
        slots = list(slots)
        self._history.release(slots)
        self._cache.release(slots)
        for slot in slots:
            self._num_run.pop(slot, None)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """See `Executor`."""
        if copies := batch.plan.copies:
            self._cache.copy(*indices_of_blocks(copies, self.block_size))
        logits: dict[int, torch.Tensor] = {}
        for together in row_batches(self._runnable(batch), pads=self.pads):
            self._run(together, batch, logits)
        wanted = [logits[span.sequence_id] for span in batch.spans if span.sequence_id in logits]
        return torch.cat(wanted) if wanted else self._call.no_logits

    def _runnable(self, batch: RaggedBatch) -> Iterator[Span]:
        """The spans to run now; chunks of a prompt that runs whole are held back until the last one."""
        for span in batch.spans:
            if not self.in_one_piece:
                yield span
                continue
            self._history.add(span)
            if span.start == 0:
                self._num_run.pop(span.slot, None)  # the sequence starts over
            if span.length > 1 and span.num_logit_rows == 0:
                continue
            can_go_on = span.start == 0 or (span.length == 1 and self._num_run.get(span.slot) == span.start)
            yield span if can_go_on else self._history.from_the_beginning(span)

    def _run(self, spans: list[Span], batch: RaggedBatch, logits: dict[int, torch.Tensor]) -> None:
        """Run spans together; add the logits `[num_logit_rows, V]` of each to `logits`, by sequence id."""
        rows = self._rows(spans, batch)
        columns, padding = np.arange(rows.num_keys), rows.num_keys - rows.ends[:, None]
        needs_mask = self._cache.has_keys or rows.tokens is not None
        token_ids = np.zeros((len(spans), rows.num_new), dtype=np.int64)
        for row, span in zip(token_ids, spans, strict=True):
            row[rows.num_new - span.length :] = span.token_ids
        self._cache.enter(rows)
        most_logits = max(span.num_logit_rows for span in spans)
        given = self._call(
            token_ids,
            np.maximum(columns - padding, 0)[:, rows.num_past :],
            columns >= padding if needs_mask else None,
            self._cache,
            most_logits,
        )
        self._cache.leave(rows)
        for number, span in enumerate(spans):
            self._num_run[span.slot] = span.end
            if span.num_logit_rows:
                logits[span.sequence_id] = given[number, most_logits - span.num_logit_rows :]

    def _rows(self, spans: list[Span], batch: RaggedBatch) -> CacheRows:
        starts, ends = (np.array([getattr(span, name) for span in spans]) for name in ("start", "end"))
        num_keys = int(ends.max())
        positions = np.maximum(np.arange(num_keys) - (num_keys - ends)[:, None], 0)
        numbers = {span.sequence_id: number for number, span in enumerate(batch.spans)}
        sequence_ids = np.array([span.sequence_id for span in spans])
        tables = np.array([numbers[each] for each in sequence_ids.tolist()])[:, None]
        gathered = cache_indices(batch.groups[0].block_tables_host, tables, positions, self.block_size)
        device, num_new = self.model.device, max(span.length for span in spans)
        written, tokens = gathered[:, num_keys - num_new :].ravel(), None
        if any(span.length < num_new for span in spans):
            tokens = np.flatnonzero(np.arange(num_new) >= num_new - (ends - starts)[:, None])
            written = written[tokens]
        return CacheRows(
            sequence_ids=sequence_ids,
            slots=np.array([span.slot for span in spans]),
            starts=starts,
            ends=ends,
            num_new=num_new,
            tokens=None if tokens is None else to_device(tokens, device),
            written=to_device(written, device),
            gathered=to_device(gathered, device),
            num_keys=num_keys,
        )

    @torch.inference_mode()
    def _own_cache(self) -> DynamicCache:
        """The model's own cache after two tokens, which shows its layout. Raises `ModelError`."""
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
