"""`make_plan`: turns a step's schedule into a `StepPlan`."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from inflight.contracts.step.plan import SlotAssignment, Span, StepPlan
from inflight.scheduling.sequence import Sequence
from inflight.scheduling.sequences import Slots
from inflight.scheduling.states import NO_STATES, StateUse


def make_plan(
    lengths: Mapping[Sequence, int],
    drafts: Mapping[Sequence, SequenceOf[int]],
    slots: Slots,
    num_groups: int,
    copies: Iterable[tuple[int, int]],
    states: Mapping[Sequence, StateUse],
) -> StepPlan:
    """The plan of a step.

    Args:
        lengths: tokens to compute for each sequence, which has its slot and blocks.
        drafts: draft tokens after these, for some.
        slots: record that the plan announces their changes.
        num_groups: of the cache.
        copies: (source, destination) blocks to copy before anything is computed.
        states: the recurrent states that each sequence reads and writes; empty: there are none.
    """
    spans = tuple(
        [
            _span(sequence, length, drafts.get(sequence, ()), states.get(sequence, NO_STATES))
            for sequence, length in lengths.items()
        ]
    )
    pairs = zip(spans, lengths, strict=True)
    assignments = tuple(
        [_assignment(span.slot, each) for span, each in pairs if slots.is_new(span.slot, each.sequence_id)]
    )
    tables = tuple(tuple([sequence.block_tables[group][:] for sequence in lengths]) for group in range(num_groups))
    return StepPlan(spans, tables, tuple(copies), slots.take_released(), assignments)


def _span(sequence: Sequence, length: int, proposed: SequenceOf[int], states: StateUse) -> Span:
    assert sequence.slot is not None
    start, sequence_length, num_draft_tokens = sequence.num_computed_tokens, len(sequence.token_ids), len(proposed)
    end = start + length
    scored_ids = sequence.ids_to_score(end)
    token_ids = sequence.token_ids[start:end]
    token_ids += proposed
    num_logit_rows = len(scored_ids) + (end == sequence_length) + num_draft_tokens
    if sequence.request.runs_whole:
        num_logit_rows = length
    return Span(
        sequence.sequence_id,
        sequence.slot,
        start,
        token_ids,
        num_logit_rows,
        sequence_length + num_draft_tokens,
        scored_ids,
        num_draft_tokens,
        states.before,
        tuple([(position - start, state) for position, state in states.after]),
    )


def _assignment(slot: int, sequence: Sequence) -> SlotAssignment:
    request = sequence.request
    return SlotAssignment(
        slot,
        sequence.sequence_id,
        sequence.index,
        tuple(sequence.token_ids),
        sequence.num_prompt_tokens,
        request.params,
        request.seed,
        request.stop_token_ids,
        request.bad_words,
        request.adapter,
        request.text,
        request.multimodal,
    )
