"""`StepCapture`: an observer of a running engine that keeps one step of it as a `StepView`."""

from collections import defaultdict
from collections.abc import Callable

from inflight.execution.attention.witness import WitnessedAttention
from inflight.observe.step_view import StepView, view_span, view_step
from inflight.record import StepRecord


class StepCapture:
    """Let `see` be called with the record of every step of an engine, from its first on.

    Args:
        witness: runs that engine's attention.
        step: the number of the step to keep.
        token_text: a token id's text; without a tokenizer the id itself.

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
        self._token_ids: defaultdict[int, dict[int, int]] = defaultdict(dict)
        witness.comparing = step == 0

    def see(self, record: StepRecord) -> None:
        """Remember who has which tokens; keep the step if it is the one."""
        batch = self._witness.batch
        assert batch is not None, "a step has run"
        self.num_steps = record.step + 1
        self._witness.comparing = self.num_steps == self._step
        row, spans = iter(batch.input_ids.tolist()), []
        for span in record.spans:
            number = self._numbers.setdefault((span.request_id, span.index), len(self._numbers))
            known = self._token_ids[number]
            known.update((position, next(row)) for position in range(span.start, span.start + span.length))
            if record.step == self._step:
                keys = [known[position] for position in range(span.start + span.length)]
                spans.append(view_span(number, span, keys, self._token_text))
        if spans:
            self.view = view_step(record, spans, batch, self._witness.calls, self._witness.name)
