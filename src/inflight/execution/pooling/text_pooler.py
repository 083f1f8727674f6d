"""`TextPooler`: passes the hidden states of completed texts to the head."""

from array import array
from dataclasses import replace

import numpy as np
import torch

from inflight.contracts.plan import Span, SpanTokens, StepPlan, StepTokens
from inflight.contracts.pooling import PooledText, PoolingPlan
from inflight.execution.executors.packed import TYPE_SHIFT
from inflight.execution.pooling.heads import Head
from inflight.execution.ragged_batch import RaggedBatch, to_device


class TextPooler:
    """Replaces sampling for a body: pools one text at a time, so that its bits depend on no other."""

    def __init__(self, head: Head, plan: PoolingPlan) -> None:
        self._head, self._plan = head, plan
        self._texts: dict[int, PooledText] = {}  # by slot

    def take(self, plan: StepPlan) -> None:
        """Track slot releases and assignments."""
        for slot in plan.released_slots:
            self._texts.pop(slot, None)
        for assignment in plan.assignments:
            assert assignment.text is not None
            self._texts[assignment.slot] = assignment.text

    def with_types(self, batch: RaggedBatch) -> RaggedBatch:
        """Add token types to a step."""
        if all(self._texts[span.slot].token_types is None for span in batch.spans):
            return batch
        types = [self._types(span) for span in batch.spans]
        shifted = to_device(np.concatenate(types) << TYPE_SHIFT, batch.positions.device)
        return replace(batch, positions=batch.positions + shifted)

    def _types(self, span: Span) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        types = self._texts[span.slot].token_types or [0] * span.end
        return np.asarray(types[span.start : span.end], dtype=np.int64)

    @torch.inference_mode()
    def pool(self, batch: RaggedBatch, states: torch.Tensor) -> StepTokens:
        """The numbers of each text whose last token has run.

        Args:
            states: `[R, H]` of the step's logit rows.
        """
        rows = states.split([span.num_logit_rows for span in batch.spans])  # type: ignore[no-untyped-call]
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # a head's work is too small for several threads
        try:
            return [self._of_span(span, own) for span, own in zip(batch.spans, rows, strict=True)]
        finally:
            torch.set_num_threads(num_threads)

    def _of_span(self, span: Span, states: torch.Tensor) -> SpanTokens:
        text = self._texts[span.slot]
        if span.end < len(text.token_ids):
            return SpanTokens([])
        if not self._plan.runs_whole(text):
            text = PooledText(text.token_ids[-1:])
        return SpanTokens([], values=array("f", self._head(text, states).float().cpu().numpy().tobytes()))
