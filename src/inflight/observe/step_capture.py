"""`StepCapture`: an observer of a running engine that keeps one step of it as a `StepView`."""

from collections.abc import Callable

from inflight.contracts.record import StepRecord
from inflight.execution.attention.witness import WitnessedAttention
from inflight.observe.step_view import StepView, view_span, view_step


class StepCapture:
    """Keeps one step; `see` must be called with the record of every step of an engine, from its first on.

    Args:
        witness: runs the engine's attention.
        step: the number of the step to keep.
        token_text: returns a token id's text; without a tokenizer, the id itself.

    Attributes:
        view: the step, once it has run.
        num_steps: how many steps have run.
    """

    def __init__(self, witness: WitnessedAttention, step: int, token_text: Callable[[int], str] = str) -> None:
        self.view: StepView | None = None
        self.num_steps = 0
        self._witness = witness
        self._step = step
        self._token_text = token_text
        self._numbers: dict[tuple[str, int], int] = {}
        self._cached: dict[int, int] = {}  # the token at each place of the cache, of whichever sequence
        self._known: dict[int, dict[int, int]] = {}  # for each sequence, the tokens seen in the cache, by position
        witness.comparing = step == 0

    def see(self, record: StepRecord) -> None:
        """Track which token is where in the cache; keep the step if it is the wanted one, and ignore later steps."""
        batch = self._witness.batch
        assert batch is not None, "a step has run"
        self.num_steps = record.step + 1
        if self.view is not None:
            return
        self._witness.comparing = self.num_steps == self._step
        self._follow_copies()
        self._cached.update(zip(batch.groups[0].cache_indices.tolist(), batch.input_ids.tolist(), strict=True))
        spans = []
        for span, table in zip(record.spans, batch.groups[0].block_tables_host.tolist(), strict=True):
            number = self._numbers.setdefault((span.request_id, span.index), len(self._numbers))
            keys = self._keys(number, table, span.start + span.length)
            if record.step == self._step:
                spans.append(view_span(number, span, keys, self._token_text))
        if spans:
            self.view = view_step(record, spans, batch, self._witness.calls, self._witness.name)

    def _follow_copies(self) -> None:
        size = self._witness.block_size
        part = size * self._witness.num_parts  # places from one block's part to the next one's
        moved = [(source * part + i, to * part + i) for source, to in self._witness.copies for i in range(size)]
        self._cached.update([(to, self._cached[source]) for source, to in moved if source in self._cached])

    def _keys(self, number: int, table: list[int], end: int) -> list[int | None]:
        """Return a sequence's tokens; None where no layer keeps them and they were never seen in the cache."""
        known, size = self._known.setdefault(number, {}), self._witness.block_size
        for position in range(end):
            if (block := table[position // size]) >= 0:
                known[position] = self._cached[block * size + position % size]
        return [known.get(position) for position in range(end)]
