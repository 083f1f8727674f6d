"""`ModelStates` models the recurrent states of a device: it follows what plans read and write, and knows the tokens of
each state.

A state has content and no owner: any sequence may continue from one with the content of its own past.
"""

from inflight.contracts.step.plan import NO_STATE, StepPlan
from tests.properties.model_cache import Place


class ModelStates:
    """The last content of each state: all places up to it; None: of a failed step."""

    def __init__(self, num_states: int) -> None:
        self.states: list[list[Place] | None] = [None] * num_states

    def run(self, plan: StepPlan, pasts: list[list[Place]]) -> int:
        """Check that each span continues from its own past, and write its states. Returns how many states it wrote
        that are of no span's end."""
        self._check(plan)
        before = [[] if span.state == NO_STATE else self.states[span.state] for span in plan.spans]
        for span, past, found in zip(plan.spans, pasts, before, strict=True):
            assert found == past[: span.start], "a span continues from its own past"
            for length, state in span.states:
                self.states[state] = past[: span.start + length]
        return sum(len(span.states) - 1 - span.num_draft_tokens for span in plan.spans)

    def spoil(self, plan: StepPlan) -> None:
        """Fail the step: every state that it would write is of no use."""
        self._check(plan)
        for span in plan.spans:
            for _, state in span.states:
                self.states[state] = None

    def _check(self, plan: StepPlan) -> None:
        written = [state for span in plan.spans for _, state in span.states]
        assert len(written) == len(set(written)), "each state is written once"
        for span in plan.spans:
            own = {state for _, state in span.states}
            assert span.state not in set(written) - own, "no span writes what another reads"
            assert (span.state == NO_STATE) == (span.start == 0)
            lengths = [length for length, _ in span.states]
            assert lengths == sorted(set(lengths)), "in order"
            certain = span.length - span.num_draft_tokens
            assert set(range(certain, span.length + 1)) <= set(lengths), "one at the end, and after each draft token"
            assert lengths[0] > 0
            assert lengths[-1] == span.length
