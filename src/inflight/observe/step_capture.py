"""`StepCapture`: captures some of a running engine's steps as `StepView`s."""

from collections.abc import Callable, Collection

from inflight.contracts.step.record import StepRecord
from inflight.execution.attention.compared import ComparedAttention
from inflight.observe.step_view import Lanes, StepView, view_span, view_step


class StepCapture:
    """Keeps steps; `observe` must be called with the record of every step of an engine, from its first on.

    Args:
        comparison: runs the engine's attention.
        steps: the numbers of the steps to keep. None: the first step in which a sequence begins in a slot that another
            one has left, beside decodes of others, and the step before; or else the first step that mixes prefill and
            decodes; or else the last one.
        token_text: returns a token id's text; without a tokenizer, the id itself.

    Attributes:
        num_steps: how many steps have run.
        lanes: which sequence had which slot in which step so far.
    """

    def __init__(
        self,
        comparison: ComparedAttention,
        steps: Collection[int] | None = None,
        token_text: Callable[[int], str] = str,
    ) -> None:
        self.num_steps = 0
        self.lanes = Lanes()
        self._kept: list[StepView] = []
        self._before: StepView | None = None  # without `steps`: the last step
        self._mixed: StepView | None = None  # and the first that mixes kinds
        self._is_complete = False
        self._comparison = comparison
        self._steps = steps
        self._token_text = token_text
        self._numbers: dict[tuple[str, int], int] = {}
        self._holders: dict[int, int] = {}  # for each slot, its last sequence
        self._cached: dict[int, int] = {}  # the token at each place of the cache, of whichever sequence
        self._known: dict[int, dict[int, int]] = {}  # for each sequence, the tokens seen in the cache, by position
        comparison.comparing = self._may_keep(0)

    @property
    def is_complete(self) -> bool:
        """Whether no later step will be kept."""
        return self._is_complete

    @property
    def views(self) -> list[StepView]:
        """The captured steps, in order."""
        if self._steps is not None or self._is_complete:
            return self._kept
        return [view for view in [self._mixed or self._before] if view is not None]

    def observe(self, record: StepRecord) -> None:
        """Track which token is where in the cache; keep the step if it is a wanted one."""
        batch = self._comparison.batch
        assert batch is not None, "a step has run"
        if self._is_complete:
            return
        self.num_steps = record.step + 1
        self._comparison.comparing = self._may_keep(self.num_steps)
        self._follow_copies()
        self._cached.update(zip(batch.groups[0].cache_indices.tolist(), batch.input_ids.tolist(), strict=True))
        spans = []
        for span, table in zip(record.spans, batch.groups[0].block_tables_host.tolist(), strict=True):
            number = self._numbers.setdefault((span.request_id, span.index), len(self._numbers))
            before = self._holders.get(span.slot, number)
            self._holders[span.slot] = number
            keys = self._keys(number, table, span.start + span.length)
            if self._may_keep(record.step):
                predecessor = None if before == number else before
                spans.append(view_span(number, span, keys, self._token_text, predecessor))
        self.lanes.add(
            {span.slot: (self._numbers[span.request_id, span.index], span.kind) for span in record.spans},
            record.num_waiting,
        )
        if spans:
            self._keep(view_step(record, spans, batch, self._comparison.calls, self._comparison.name))

    def _may_keep(self, step: int) -> bool:
        return self._steps is None or step in self._steps

    def _keep(self, view: StepView) -> None:
        if self._steps is not None:
            self._kept.append(view)
            self._is_complete = view.step >= max(self._steps)
            return
        if view.is_handover:
            self._kept = [each for each in (self._before, view) if each is not None]
            self._is_complete = True
        elif view.mixes_kinds and self._mixed is None:
            self._mixed = view
        self._before = view

    def _follow_copies(self) -> None:
        size = self._comparison.block_size
        part = size * self._comparison.num_parts  # places from one block's part to the next one's
        moved = [(source * part + i, to * part + i) for source, to in self._comparison.copies for i in range(size)]
        self._cached.update([(to, self._cached[source]) for source, to in moved if source in self._cached])

    def _keys(self, number: int, table: list[int], end: int) -> list[int | None]:
        """Return a sequence's tokens; None where no layer keeps them and they were never seen in the cache."""
        known, size = self._known.setdefault(number, {}), self._comparison.block_size
        for position in range(end):
            if (block := table[position // size]) >= 0:
                known[position] = self._cached[block * size + position % size]
        return [known.get(position) for position in range(end)]
