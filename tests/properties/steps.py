"""What must be true of a step: admissions, preemptions, the content of its plan, and the use of its budget."""

from typing import TYPE_CHECKING

from inflight.contracts.step.plan import NO_BLOCK, Span, StepPlan
from tests.properties.expected import Expected

if TYPE_CHECKING:
    from tests.properties.world import World


def check_admissions(world: "World", preempted: list[Expected], admitted: list[Expected]) -> None:
    """Preempted sequences are the worst that ran, and give way to a better one if one was admitted; the best waiting
    sequence is admitted."""
    order = world.service_order
    survivors = [each for each in world.running() if each not in admitted]
    if preempted and survivors:
        assert max(map(order, survivors)) < min(map(order, preempted)), "the worst goes first"
    is_held_back = world.scheduler._is_held_back  # then others may pass
    if preempted and admitted and not is_held_back:
        order_counts = world.sizes.aging_steps is not None or all(each.is_background for each in preempted)
        assert order_counts, "blocks given back belong to those who asked for them"
        assert min(map(order, admitted))[0] < min(map(order, preempted))[0], "only for a strictly better one"
    waiting = world.waiting()
    if admitted and waiting and not is_held_back:
        assert max(map(order, admitted)) < min(map(order, waiting)), "the best comes in first"


def check_plan(world: "World", plan: StepPlan) -> None:
    assert 1 <= plan.num_tokens <= world.sizes.budget
    assert len(plan.spans) == len({span.sequence_id for span in plan.spans}) <= world.sizes.num_slots
    assert len(plan.tables) == len(world.sizes.windows)
    in_flight = set(world.scheduler.reuse._blocks_in_flight)
    for span, *tables in zip(plan.spans, *plan.tables, strict=True):
        expected = world.unfinished[span.sequence_id]
        assert span.start == expected.num_computed
        known_end = span.end - span.num_draft_tokens
        assert list(span.token_ids) == expected.token_ids[span.start : known_end] + list(span.draft_token_ids)
        assert known_end > span.start
        assert span.sequence_length == len(expected.token_ids) + span.num_draft_tokens
        is_last = known_end == len(expected.token_ids)
        assert span.num_logit_rows == len(span.scored_ids) + is_last + span.num_draft_tokens <= span.length
        if span.num_draft_tokens:
            check_draft_tokens(world, span, expected)
        prompt = expected.request.prompt_token_ids
        assert list(span.scored_ids) == (prompt[expected.num_scored : span.end + 1] if expected.wants_scores else [])
        world.reached["prompts scored in pieces"] += bool(span.scored_ids) and not is_last
        assert tuple(tables) == expected.sequence.block_tables
        for group, table in enumerate(tables):
            assert len(table) * world.pool.block_size >= span.end
            for block in table[span.start // world.pool.block_size :]:
                if block not in in_flight:
                    assert world.pool.node_of(block) is None, "what can be found is not written to"
                    assert world.pool.num_holders(block) == 1, "the written block has one holder"
            # One token more than the window shows, for siblings that fork from it.
            num_gone = world.sizes.first_seen(group, max(0, span.start - 1)) // world.pool.block_size
            assert all(block == NO_BLOCK for block in table[:num_gone]), "blocks outside the window are released"
            world.reached["blocks let go"] += num_gone
    assert sum(each.length for each in scored(world, plan)) <= world.sizes.max_scored
    assert all(world.pool.num_holders(destination) for _, destination in plan.copies), "a copy is for somebody"


def check_draft_tokens(world: "World", span: Span, expected: Expected) -> None:
    """Only decodes are followed by draft tokens, as far as the sequence may reach and the model sees it as before."""
    assert span.start == len(expected.token_ids) - 1
    assert span.end < expected.request.max_num_tokens
    beyond = world.sizes.recompute_beyond
    assert beyond is None or (len(expected.token_ids) > beyond) == (span.end > beyond)


def scored(world: "World", plan: StepPlan) -> list[Span]:
    """The spans of sequences whose prompts are being scored."""
    return [span for span in plan.spans if world.unfinished[span.sequence_id].wants_scores]


def check_budget(world: "World", plan: StepPlan, decodes: list[Expected], has_preempted: bool) -> None:
    """Decodes come first, prefills with them stay within their limit, and no usable budget is left. All of this is so
    among those that are not in the background, if any of them runs, else in the background."""
    ends = {span.sequence_id: span.end - span.num_draft_tokens for span in plan.spans}
    known = {span.sequence_id: span.length - span.num_draft_tokens for span in plan.spans}
    beside = [each for each in map(world.unfinished.__getitem__, ends) if each.is_background]
    in_background = len(beside) == len(ends)
    if not in_background and beside:
        num_beside = sum(known[each.sequence_id] for each in beside)
        assert num_beside <= world.sizes.background_tokens
        world.reached["steps with others beside the background"] += 1
    decodes = [each for each in decodes if each.is_background == in_background]
    decoding = {each.sequence_id for each in decodes}
    assert decoding <= ends.keys(), "a decode never waits"
    mine = {each for each in ends if world.unfinished[each].is_background == in_background}
    num_prefill = sum(known[each] for each in mine - decoding)
    limit = world.sizes.budget
    if world.sizes.max_prefill is not None and (decoding or in_background):
        limit = world.sizes.max_prefill
        assert num_prefill <= limit
    num_known = sum(known[each] for each in mine)
    if num_known == world.sizes.budget or num_prefill >= limit or num_prefill >= (world.sizes.max_prefill or limit):
        return
    no_rows_left = sum(span.length for span in scored(world, plan)) == world.sizes.max_scored
    for each in world.running():
        if each.is_background != in_background:
            world.reached["steps that the background rested in"] += each.is_background
        elif each.wants_scores and no_rows_left:
            world.reached["prompts that waited for rows of logits"] += 1
        elif each.sequence_id not in ends:
            has_sibling = any(sibling.sequence_id < each.sequence_id for sibling in world.siblings(each))
            assert has_sibling or world.states is not None
            assert each.sequence.num_blocks == 0
            world.reached["steps waited for a sibling" if has_sibling else "steps waited for a state"] += 1
        else:
            assert has_preempted or ends[each.sequence_id] == len(each.token_ids)
    waiting = world.waiting()
    if waiting and not has_preempted:
        best = min(waiting, key=world.service_order)
        if best.is_background != in_background or (beside and not in_background):
            return  # blocks that those beside let go came too late
        no_slot = len(world.running()) == world.sizes.num_slots
        is_held_back = world.scheduler._is_held_back
        assert (
            no_slot or is_held_back or world.sizes.layout.max_num_blocks(len(best.token_ids)) > world.pool.num_available
        )
