"""`World`: a scheduler, the model cache, and what must be true of every sequence, driven one operation after the other.

`test_scheduler_machine.py` lets Hypothesis choose the operations, `soak.py` a random generator at full speed.
"""

from collections import Counter
from collections.abc import Sequence as SequenceOf

import pytest

from inflight.plan import NO_BLOCK, Span, StepPlan
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.prefix_cache import Node, Parent, Root
from inflight.scheduling.scheduler import Scheduler
from inflight.scheduling.sequence import Request
from tests.properties.expected import Expected, Lanes, Sizes
from tests.properties.model_cache import ModelCache, Place, of_group

NOBODY = -1
"""A sequence that never was."""


class World:
    """Requests come, steps are planned and land in every way there is, sequences are ended at any time."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.pool = BlockPool(sizes.num_blocks, sizes.layout)
        self.scheduler = Scheduler(
            self.pool,
            sizes.max_num_seqs,
            sizes.budget,
            max_prefill_tokens_per_step=sizes.max_prefill,
            aging_steps=sizes.aging_steps,
            enable_prefix_caching=sizes.prefix_caching,
            max_scored_tokens=sizes.max_scored,
            recompute_beyond=sizes.recompute_beyond,
        )
        self.cache = ModelCache(sizes)
        self.lanes = Lanes(sizes.num_slots)
        self.unfinished: dict[int, Expected] = {}
        self.in_flight: StepPlan | None = None
        self.hit: list[Expected] = []
        """Those of the step in flight."""
        self.pasts: list[list[Place]] = []
        self.num_requests = self.num_sequences = self.num_plans = 0
        self.num_preemptions = 0
        self.turns: list[list[int]] = [[]]
        """Whole sequences that have finished, for others to begin with."""
        self.outcomes: dict[tuple[str, int], tuple[list[int], str]] = {}
        """For each request and index that has ended: its output, and why it ended."""
        self.contents: dict[Node, tuple[Root, tuple[int, ...]]] = {}
        """All tokens up to the end of its block."""
        self.reached: Counter[str] = Counter()

    # --------------------------------------------------------------------------------- what may happen

    def submit(
        self,
        prompt: list[int],
        max_output: int,
        *,
        num_sequences: int = 1,
        stop_token_ids: frozenset[int] = frozenset(),
        min_output: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        scores_prompt: bool = False,
    ) -> None:
        """A request that the door lets in: it can run to its end alone in the cache."""
        prompt = prompt[: self.sizes.capacity - 1]
        request = Request(
            request_id=f"request {self.num_requests}",
            prompt_token_ids=prompt,
            max_num_tokens=min(len(prompt) + max_output, self.sizes.capacity),
            min_output_tokens=min_output,
            stop_token_ids=stop_token_ids,
            num_sequences=num_sequences,
            priority=priority,
            cache_salt=cache_salt,
            scores_prompt=scores_prompt,
        )
        self.num_requests += 1
        self.scheduler.submit(request)
        new = sorted(
            (each for each in self.scheduler.sequences() if each.sequence_id >= self.num_sequences),
            key=lambda sequence: sequence.sequence_id,
        )
        assert [each.sequence_id for each in new] == list(range(self.num_sequences, self.num_sequences + num_sequences))
        assert [each.index for each in new] == list(range(num_sequences))
        self.num_sequences += num_sequences
        for sequence in new:
            self.unfinished[sequence.sequence_id] = Expected(sequence, request, list(prompt), self.num_plans)

    def plan(self) -> None:
        """Plan a step, and leave it in flight."""
        if self.in_flight is not None:
            with pytest.raises(RuntimeError, match="in flight"):
                self.scheduler.plan()
            return
        decodes = [each for each in self.running() if each.num_owed == 1]
        known = self.known_nodes()
        for each in self.unfinished.values():
            each.num_computed_before = each.num_computed
        plan = self.scheduler.plan()
        preempted, admitted, readmitted = self.follow_admissions()
        self.check_who_was_preempted_and_who_admitted(preempted, admitted)
        self.reached["evictions"] += len(known - self.known_nodes())
        if plan is None:
            assert not self.unfinished
            self.num_plans += 1
            return
        self.follow_reuse(plan)
        self.check_what_is_computed(plan)
        decodes = [each for each in decodes if each not in preempted]
        self.check_that_the_budget_is_well_spent(plan, decodes, bool(preempted) and not admitted)
        self.lanes.take_in(plan, self.running(), readmitted)
        self.num_plans += 1
        self.in_flight = plan
        self.hit = [self.unfinished[span.sequence_id] for span in plan.spans]
        self.pasts = [self.past(each, span.end) for each, span in zip(self.hit, plan.spans, strict=True)]
        self.reached["copies"] += len(plan.copies)
        self.reached["steps"] += 1

    def commit(self, sampled: SequenceOf[list[int]]) -> None:
        """Land the step in flight, or one planned now; `sampled` goes to one span after the other, round and round."""
        if (plan := self.take_off()) is None:
            return
        self.reached["spans that read what another wrote in the same step"] += self.cache.run(plan, self.pasts)
        chosen = [span.num_logit_rows > len(span.scored_ids) for span in plan.spans]
        rows = [sampled[i % len(sampled)] if chosen[i] else [] for i in range(len(plan.spans))]
        progress = self.scheduler.commit(plan, rows)
        given, beyond = [], self.sizes.recompute_beyond
        for index, (expected, span, row) in enumerate(zip(self.hit, plan.spans, rows, strict=True)):
            if expected.finish_reason is not None:
                continue
            expected.num_computed = span.end
            expected.num_scored += len(span.scored_ids)
            if row:
                assert not expected.wants_scores, "all of the prompt is scored before the first token"
            if row:
                num_before = len(expected.token_ids)
                given.append((span.sequence_id, expected.take(row), expected.finish_reason))
                outgrown = beyond is not None and num_before <= beyond < len(expected.token_ids)
                if outgrown and expected.finish_reason is None:
                    expected.num_computed = 0
                    self.reached["LongRoPE restarts"] += 1
            self.reached["duplicates given up"] += any(
                a != b
                for planned, now in zip(plan.tables, expected.sequence.block_tables, strict=True)
                for a, b in zip(planned[index], now, strict=False)
            )
        assert given == [(p.sequence.sequence_id, p.new_token_ids, p.sequence.finish_reason) for p in progress]
        self.forget_finished()
        self.follow_early_forks()

    def fail(self) -> None:
        """The step in flight, or one planned now, goes wrong."""
        if (plan := self.take_off()) is None:
            return
        self.cache.spoil(plan)
        hit = [each for each in self.hit if each.finish_reason is None]
        assert self.scheduler.fail(plan) == [each.sequence for each in hit]
        for each in hit:
            each.end("error")
        self.forget_finished()
        self.follow_restarts()

    def discard(self) -> None:
        """The step in flight, if there is one, is given up halfway."""
        if self.in_flight is not None and (plan := self.take_off()) is not None:
            self.cache.spoil(plan)
            self.lanes.reported_in_vain |= set(plan.released_slots)
            self.scheduler.discard()
            self.forget_finished()
            self.follow_restarts()
        else:
            self.scheduler.discard()

    def abort(self, pick: int) -> None:
        """Abort a request that waits, runs, is in flight, has finished or was never heard of."""
        unfinished = sorted({each.request.request_id for each in self.unfinished.values()})
        candidates = [*unfinished, "request 0", "nobody"]
        request_id = candidates[pick % len(candidates)]
        hit = [each for each in self.unfinished.values() if each.request.request_id == request_id]
        assert {each.sequence for each in hit} == set(self.scheduler.abort(request_id))
        for each in hit:
            each.end("abort")
        self.forget_finished()

    def finish(self, pick: int, num_kept: int | None) -> None:
        """End one sequence, perhaps with fewer tokens than it has, as a stop string does."""
        candidates = [*self.unfinished, NOBODY]
        sequence_id = candidates[pick % len(candidates)]
        ended = self.scheduler.finish(sequence_id, "stop", num_kept)
        if (expected := self.unfinished.get(sequence_id)) is None:
            assert ended is None
            return
        assert ended is expected.sequence
        expected.end("stop")
        if num_kept is not None:
            expected.token_ids = expected.token_ids[: len(expected.request.prompt_token_ids) + num_kept]
        self.forget_finished()
        self.follow_early_forks()

    def drain(self) -> None:
        """Everybody finishes within a bound, and then everything is free again."""
        self.discard()
        self.check()
        # Without aging the oldest is never preempted and computes at least one token a step; past a length, it may
        # start over once. With aging the order changes a little over time, but each change costs a token given out.
        bound = 2 * sum(each.request.max_num_tokens for each in self.unfinished.values())
        if self.sizes.aging_steps is not None:
            bound *= 2 + max((each.request.max_num_tokens for each in self.unfinished.values()), default=0)
        num_steps = 0
        while self.unfinished:
            num_steps += 1
            assert num_steps <= bound
            self.commit([[0]])
            self.check()
        assert self.scheduler.plan() is None
        self.num_plans += 1
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert (self.pool.num_available, self.pool.num_used) == (self.pool.num_blocks, 0)
        self.check_that_all_slots_are_free()

    def check_that_all_slots_are_free(self) -> None:
        """As many newcomers as one step can take get the slots from 0, and whoever had them is known to be gone."""
        num_newcomers = min(self.sizes.num_slots, self.pool.num_blocks // len(self.sizes.windows))
        for _ in range(num_newcomers):
            self.submit([9], 1)
        self.plan()
        assert self.in_flight is not None
        assert sorted(span.slot for span in self.in_flight.spans) == list(range(num_newcomers))
        self.commit([[0]])
        assert not self.unfinished

    def take_off(self) -> StepPlan | None:
        """The step in flight, or one planned now; None if there is nothing to compute."""
        if self.in_flight is None:
            self.plan()
        plan, self.in_flight = self.in_flight, None
        return plan

    # --------------------------------------------------------------------------------- following the scheduler

    def follow_admissions(self) -> tuple[list[Expected], list[Expected], set[int]]:
        """Who lost its slot in this plan, who was given one, and the slots of those who did both."""
        preempted, admitted, readmitted = [], [], set()
        slot_of = {owner: slot for slot, owner in self.lanes.owners.items()}
        for each in self.unfinished.values():
            if each.sequence.num_preemptions > each.num_preemptions:
                assert each.is_running
                each.num_preemptions += 1
                self.num_preemptions += 1
                each.num_computed = each.num_computed_before = 0
                each.is_running = False
                preempted.append(each)
            if not each.is_running and each.sequence.slot is not None:
                each.is_running = True
                admitted.append(each)
                if each in preempted:
                    readmitted.add(slot_of[each.sequence_id])
        self.reached["preemptions for a better one" if admitted else "preemptions for blocks"] += len(preempted)
        return preempted, admitted, readmitted

    def follow_reuse(self, plan: StepPlan) -> None:
        """A sequence may find more computed than it had left behind; that it is right is seen when it is read."""
        for each in self.running():
            num_found = each.sequence.num_computed_tokens
            assert each.num_computed <= num_found < len(each.token_ids), "the last token is always computed"
            if num_found > each.num_computed:
                assert not each.wants_scores, "what is scored has to be computed"
                num_shared = len(each.request.prompt_token_ids) - 1
                is_fork = num_found == num_shared and self.siblings(each)
                assert is_fork or (self.sizes.prefix_caching and num_found % self.sizes.block_size == 0)
                self.reached["sequences that found something computed"] += 1
                each.num_computed = num_found

    def follow_early_forks(self) -> None:
        """Who waits for a sibling is forked from it before it goes."""
        for each in self.running():
            num_found = each.sequence.num_computed_tokens
            if num_found != each.num_computed:
                assert (each.num_computed, num_found) == (0, len(each.request.prompt_token_ids) - 1)
                each.num_computed = num_found
                self.reached["forks from a sibling that ends"] += 1

    def follow_restarts(self) -> None:
        """After a step that went wrong a sequence owes what it owed before, or everything if it counted on that."""
        for each in self.running():
            num_kept = each.sequence.num_computed_tokens
            self.reached["restarts after a step that went wrong"] += num_kept < each.num_computed
            each.num_computed = num_kept if num_kept == each.num_computed_before else 0
        self.follow_early_forks()

    def forget_finished(self) -> None:
        for sequence_id, each in list(self.unfinished.items()):
            if each.finish_reason is not None:
                assert each.sequence.token_ids == each.token_ids
                assert each.sequence.finish_reason == each.finish_reason
                key = (each.request.request_id, each.sequence.index)
                assert key not in self.outcomes, "a sequence ends once"
                self.outcomes[key] = (each.token_ids[len(each.request.prompt_token_ids) :], each.finish_reason)
                self.turns = [*self.turns[-2:], each.token_ids]
                del self.unfinished[sequence_id]
                self.reached[f"ended with {each.finish_reason}"] += 1

    # --------------------------------------------------------------------------------- what must be true of a step

    def service_order(self, each: Expected) -> tuple[int, int]:
        """As the policy says, word for word."""
        if self.sizes.aging_steps is None:
            return 0, each.sequence_id
        return each.request.priority - (self.num_plans - each.arrival) // self.sizes.aging_steps, each.sequence_id

    def check_who_was_preempted_and_who_admitted(self, preempted: list[Expected], admitted: list[Expected]) -> None:
        """Victims are the worst that ran, for a better one if somebody came in; who comes in is the best that waits."""
        order = self.service_order
        survivors = [each for each in self.running() if each not in admitted]
        if preempted and survivors:
            assert max(map(order, survivors)) < min(map(order, preempted)), "the worst goes first"
        if preempted and admitted:
            assert self.sizes.aging_steps is not None, "blocks given back belong to those who asked for them"
            assert min(map(order, admitted))[0] < min(map(order, preempted))[0], "only for a strictly better one"
        waiting = [each for each in self.unfinished.values() if not each.is_running]
        if admitted and waiting:
            assert max(map(order, admitted)) < min(map(order, waiting)), "the best comes in first"

    def check_what_is_computed(self, plan: StepPlan) -> None:
        assert 1 <= plan.num_tokens <= self.sizes.budget
        assert len(plan.spans) == len({span.sequence_id for span in plan.spans}) <= self.sizes.num_slots
        assert len(plan.tables) == len(self.sizes.windows)
        in_flight = set(self.scheduler.reuse._blocks_in_flight)
        for span, *tables in zip(plan.spans, *plan.tables, strict=True):
            expected = self.unfinished[span.sequence_id]
            assert span.start == expected.num_computed
            assert list(span.token_ids) == expected.token_ids[span.start : span.end] != []
            assert span.sequence_length == len(expected.token_ids)
            is_last = span.end == len(expected.token_ids)
            assert span.num_logit_rows == len(span.scored_ids) + is_last <= span.length
            prompt = expected.request.prompt_token_ids
            assert list(span.scored_ids) == (
                prompt[expected.num_scored : span.end + 1] if expected.wants_scores else []
            )
            self.reached["prompts scored in pieces"] += bool(span.scored_ids) and not is_last
            assert tuple(tables) == expected.sequence.block_tables
            for group, table in enumerate(tables):
                assert len(table) * self.pool.block_size >= span.end
                for block in table[span.start // self.pool.block_size :]:
                    if block not in in_flight:
                        assert self.pool.node_of(block) is None, "what can be found is not written to"
                        assert self.pool.num_holders(block) == 1, "nobody else reads what is written"
                # One token more than is seen, for those who fork from it.
                num_gone = self.sizes.first_seen(group, max(0, span.start - 1)) // self.pool.block_size
                assert all(block == NO_BLOCK for block in table[:num_gone]), "what nobody sees is let go"
                self.reached["blocks let go"] += num_gone
        assert sum(each.length for each in self.scored(plan)) <= self.sizes.max_scored
        assert all(self.pool.num_holders(destination) for _, destination in plan.copies), "a copy is for somebody"

    def scored(self, plan: StepPlan) -> list[Span]:
        """The spans of those whose prompts are being scored."""
        return [span for span in plan.spans if self.unfinished[span.sequence_id].wants_scores]

    def check_that_the_budget_is_well_spent(self, plan: StepPlan, decodes: list[Expected], has_preempted: bool) -> None:
        """Decodes first; prefills beside them within their own limit; and nothing is left that could be used."""
        ends = {span.sequence_id: span.end for span in plan.spans}
        decoding = {each.sequence_id for each in decodes}
        assert decoding <= ends.keys(), "a decode never waits"
        num_prefill = sum(span.length for span in plan.spans if span.sequence_id not in decoding)
        limit = self.sizes.budget
        if self.sizes.max_prefill is not None and decoding:
            limit = self.sizes.max_prefill
            assert num_prefill <= limit
        if plan.num_tokens == self.sizes.budget or num_prefill >= min(limit, self.sizes.max_prefill or limit):
            return
        no_rows_left = sum(span.length for span in self.scored(plan)) == self.sizes.max_scored
        for each in self.running():
            if each.wants_scores and no_rows_left:
                self.reached["prompts that waited for rows of logits"] += 1
            elif each.sequence_id not in ends:
                assert any(sibling.sequence_id < each.sequence_id for sibling in self.siblings(each))
                assert each.sequence.num_blocks == 0
                self.reached["steps waited for a sibling"] += 1
            else:
                assert has_preempted or ends[each.sequence_id] == len(each.token_ids)
        waiting = [each for each in self.unfinished.values() if not each.is_running]
        if waiting and not has_preempted:
            best = min(waiting, key=self.service_order)
            no_slot = len(self.running()) == self.sizes.num_slots
            assert no_slot or self.sizes.layout.max_num_blocks(len(best.token_ids)) > self.pool.num_available

    # --------------------------------------------------------------------------------- what must be true always

    def check(self) -> None:
        """All that must hold between any two operations."""
        self.check_sequences()
        self.check_blocks()
        self.check_prefix_cache()
        if self.in_flight is None:
            self.check_contents()

    def check_sequences(self) -> None:
        sequences = list(self.scheduler.sequences())
        num_running = self.scheduler.num_running
        assert len(sequences) == len(self.unfinished) == num_running + self.scheduler.num_waiting
        running = sorted(self.running(), key=self.service_order)
        waiting = sorted((e for e in self.unfinished.values() if not e.is_running), key=self.service_order)
        assert [each.sequence_id for each in [*running, *waiting]] == [each.sequence_id for each in sequences]
        assert set(self.scheduler._of_request) == {each.request.request_id for each in self.unfinished.values()}
        for each in self.unfinished.values():
            sequence = each.sequence
            assert sequence.token_ids == each.token_ids
            assert sequence.finish_reason is None
            assert sequence.num_computed_tokens == each.num_computed
            assert 0 <= sequence.num_cached_tokens < sequence.num_prompt_tokens
            if each.is_running:
                assert sequence.slot is not None
                assert self.scheduler.running(sequence.sequence_id) is sequence
                assert self.lanes.owners[sequence.slot] == sequence.sequence_id, "a sequence keeps its slot"
            else:
                assert (sequence.slot, sequence.num_blocks, sequence.num_computed_tokens) == (None, 0, 0)
        assert self.scheduler.num_preemptions == self.num_preemptions

    def check_blocks(self) -> None:
        """References are those of the tables, and free + used + cached = all."""
        tables = [each.sequence.block_tables for each in self.unfinished.values()]
        if self.in_flight is not None:  # those of the ended are kept until the step in flight has landed
            ended = [each.sequence for each in self.hit if each.finish_reason is not None]
            assert all(sequence.slot is not None and sequence.num_blocks for sequence in ended)
            tables += [sequence.block_tables for sequence in ended]
        self.pool.check(tables)
        held = {block for of_sequence in tables for table in of_sequence for block in table}
        assert self.pool.num_used == len(held - {NO_BLOCK})
        assert self.pool.num_free + self.pool.num_used + self.pool.num_cached == self.pool.num_blocks

    def check_prefix_cache(self) -> None:
        """A node is known as long as any of its blocks or any behind it, and its blocks hold what it says."""
        nodes = self.known_nodes()
        assert self.sizes.prefix_caching or not nodes
        num_children = Counter(node.key[0] for node in nodes)
        in_flight = set(self.scheduler.reuse._blocks_in_flight) if self.in_flight is not None else set()
        block_size = self.pool.block_size
        for node in nodes:
            root, before = self.content_of(node.key[0])
            own = tuple(memoryview(node.key[1]).cast("i"))
            assert self.content_of(node) == (root, (*before, *own)), "a node's content never changes"
            assert node.num_children >= num_children[node]
            assert node.num_children or any(block != NO_BLOCK for block in node.blocks)
            for group, block in enumerate(node.blocks):
                if block == NO_BLOCK:
                    continue
                assert self.pool.node_of(block) is node
                if block not in in_flight:
                    places = self.cache.places[block * block_size : (block + 1) * block_size]
                    past = [(i, token, root.is_long, root.cache_salt) for i, token in enumerate(own, len(before))]
                    expected = [of_group(place, group) for place in past]
                    assert places == expected, "the cache never returns a block with other content"

    def check_contents(self) -> None:
        """What a running sequence counts as computed is there, and found by others as well."""
        to_copy = {destination for _, destination in self.scheduler.reuse.copies}
        for each in self.running():
            num_computed = each.num_computed
            for group, table in enumerate(each.sequence.block_tables):
                if not to_copy.isdisjoint(table):
                    continue
                first = self.sizes.first_seen(group, num_computed)
                expected = [of_group(place, group) for place in self.past(each, num_computed)[first:]]
                assert self.cache.read(table, first, num_computed) == expected
                if self.sizes.prefix_caching:
                    for index in range(num_computed // self.pool.block_size):
                        if table[index] != NO_BLOCK:
                            node = self.pool.node_of(table[index])
                            assert node is not None
                            content = list(self.content_of(node)[1])
                            assert content == each.token_ids[: (index + 1) * self.pool.block_size]

    # --------------------------------------------------------------------------------- looking

    def running(self) -> list[Expected]:
        return [each for each in self.unfinished.values() if each.is_running]

    def siblings(self, each: Expected) -> list[Expected]:
        """The other running sequences of its request."""
        return [other for other in self.running() if other.request is each.request and other is not each]

    def past(self, each: Expected, end: int) -> list[Place]:
        beyond = self.sizes.recompute_beyond
        is_long = beyond is not None and len(each.token_ids) > beyond
        return [(i, token, is_long, each.request.cache_salt) for i, token in enumerate(each.token_ids[:end])]

    def known_nodes(self) -> set[Node]:
        return set(self.pool._prefix_cache._nodes.values())

    def content_of(self, parent: Parent) -> tuple[Root, tuple[int, ...]]:
        """All tokens up to the end of a node's block, as they were when it was first seen."""
        if isinstance(parent, Root):
            return parent, ()
        if parent not in self.contents:
            root, before = self.content_of(parent.key[0])
            self.contents[parent] = root, (*before, *memoryview(parent.key[1]).cast("i"))
        return self.contents[parent]
