"""`World`: a scheduler, the model cache, and the expected state of every sequence, driven one operation at a time.

Each step is checked with `steps.py`; between operations, the driver calls `invariants.check`:
`test_scheduler_machine.py` lets Hypothesis choose the operations, `soak.py` a random generator at full speed.
"""

from collections import Counter
from collections.abc import Sequence as SequenceOf

import pytest

from inflight.contracts.api.config import BACKGROUND
from inflight.contracts.step.plan import Span, StepPlan
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.prefix_cache import Parent, PrefixNode, Root
from inflight.scheduling.retention import Retention
from inflight.scheduling.scheduler import Limits, Scheduler
from inflight.scheduling.sequence import Request, Sequence
from tests.properties.expected import Expected, Lanes, Runner, Sizes
from tests.properties.invariants import check
from tests.properties.model_cache import ModelCache, Place
from tests.properties.model_states import ModelStates
from tests.properties.random_speculator import RandomSpeculator
from tests.properties.random_store import RandomStore
from tests.properties.steps import check_admissions, check_budget, check_plan

NOBODY = -1
"""The id of a sequence that never existed."""


class World:
    """Requests arrive, steps are planned and land in every possible way, and sequences are ended at any time."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.pool = BlockPool(sizes.num_blocks, sizes.layout)
        self.cache = ModelCache(sizes)
        self.states = ModelStates(sizes.num_states) if sizes.num_states else None
        self.store = None if sizes.storing is None else RandomStore(sizes.storing, self.cache, self.states)
        self.now = 0.0
        retention = None
        if sizes.retention is not None:
            retention = Retention(self.pool, sizes.retention, lambda: self.now)
            retention.observe_prefill(1, 1.0)
        self.scheduler = Scheduler(
            self.pool,
            Limits(
                max_num_seqs=sizes.max_num_seqs,
                max_num_batched_tokens=sizes.budget,
                max_prefill_tokens_per_step=sizes.max_prefill,
                background_tokens_per_step=sizes.background_tokens,
                max_scored_tokens=sizes.max_scored,
                recompute_beyond=sizes.recompute_beyond,
            ),
            aging_steps=sizes.aging_steps,
            enable_prefix_caching=sizes.prefix_caching,
            sharing="blocks" if sizes.sharing else "slots",
            speculator=None if sizes.drafting is None else RandomSpeculator(sizes.drafting),
            block_store=self.store,
            retention=retention,
            num_states=sizes.num_states,
        )
        self.scheduler.reuse.least_awaited = 1
        self.lanes = Lanes(sizes.num_slots)
        self.runners = Runner(), Runner()
        """One follows only the committed steps, the other all planned steps."""
        self.unfinished: dict[int, Expected] = {}
        self.in_flight: StepPlan | None = None
        self.hit: list[Expected] = []
        """The sequences in the step in flight."""
        self.pasts: list[list[Place]] = []
        self.num_requests = self.num_sequences = self.num_plans = 0
        self.num_preemptions = 0
        self.preempted_in_vain: set[int] = set()
        """The sequences that lost their slots when there was nothing to compute then."""
        self.turns: list[list[int]] = [[]]
        """Finished sequences that later prompts can begin with."""
        self.outcomes: dict[tuple[str, int], tuple[list[int], str]] = {}
        """For each ended request and index, the output and the finish reason."""
        self.contents: dict[PrefixNode, tuple[Root, tuple[int, ...]]] = {}
        """All tokens up to the end of a node's block."""
        self.reached: Counter[str] = Counter()

    # --------------------------------------------------------------------------------- operations

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
        """Submit a request that passes admission: it can run to its end alone in the cache."""
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
            (each for each in self.scheduler.unfinished() if each.sequence_id >= self.num_sequences),
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
        self.advance_store()
        decodes = [each for each in self.running() if each.num_owed == 1]
        known = self.known_nodes()
        for each in self.unfinished.values():
            each.num_computed_before = each.num_computed
        self.now += 1
        plan = self.scheduler.plan()
        self.reached["steps in which blocks were kept from others"] += self.scheduler._is_held_back
        preempted, admitted, readmitted = self.follow_admissions()
        check_admissions(self, preempted, admitted)
        self.reached["evictions"] += len(known - self.known_nodes())
        if plan is None:
            assert not self.unfinished or self.scheduler.persistence.is_waiting or self.scheduler.idle_seconds
            self.now += self.scheduler.idle_seconds
            self.preempted_in_vain |= {each.sequence_id for each in preempted}
            self.num_plans += 1
            return
        self.follow_reuse(preempted)
        check_plan(self, plan)
        decodes = [each for each in decodes if each not in preempted]
        blocks_came_late = any(each.is_background for each in preempted)
        check_budget(self, plan, decodes, blocks_came_late or (bool(preempted) and not admitted))
        left = None if self.sizes.sharing else {each.sequence_id: each.slot for each in self.left()}
        self.lanes.take_in(plan, self.running(), readmitted, left)
        self.preempted_in_vain.clear()
        self.runners[1].take_in(plan)
        self.num_plans += 1
        self.in_flight = plan
        self.hit = [self.unfinished[span.sequence_id] for span in plan.spans]
        self.pasts = [self.past(each, span) for each, span in zip(self.hit, plan.spans, strict=True)]
        self.reached["copies"] += len(plan.copies)
        self.reached["steps"] += 1

    def commit(self, sampled: SequenceOf[list[int]]) -> None:
        """Commit the step in flight, or one planned now; its spans get the tokens of `sampled` in turn, repeatedly."""
        if (plan := self.take_off()) is None:
            return
        self.advance_store()
        self.reached["spans that read what another wrote in the same step"] += self.cache.run(plan, self.pasts)
        if self.states is not None:
            self.reached["states left on the way"] += self.states.run(plan, self.pasts)
        self.runners[0].take_in(plan)
        for runner in self.runners:
            runner.check(plan, self.hit)
        chosen = [span.num_logit_rows > len(span.scored_ids) for span in plan.spans]
        rows = [chosen_after(span, sampled[i % len(sampled)]) if chosen[i] else [] for i, span in enumerate(plan.spans)]
        progress = self.scheduler.commit(plan, rows)
        given, beyond = [], self.sizes.recompute_beyond
        for index, (expected, span, row) in enumerate(zip(self.hit, plan.spans, rows, strict=True)):
            if expected.finish_reason is not None:
                continue
            expected.num_computed = span.end - span.num_draft_tokens
            expected.num_scored += len(span.scored_ids)
            if row:
                assert not expected.wants_scores, "all of the prompt is scored before the first token"
            if row:
                num_before = len(expected.token_ids)
                taken = expected.take(row)
                given.append((span.sequence_id, taken, expected.finish_reason))
                if span.num_draft_tokens:
                    expected.num_computed += len(taken) - 1
                    self.reached["accepted draft tokens"] += len(taken) - 1
                    self.reached["rejected draft tokens"] += span.num_draft_tokens - len(taken) + 1
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
        """Fail the step in flight, or one planned now."""
        if (plan := self.take_off()) is None:
            return
        self.spoil(plan)
        hit = [each for each in self.hit if each.finish_reason is None]
        assert self.scheduler.fail(plan) == [each.sequence for each in hit]
        for each in hit:
            each.end("error")
        self.forget_finished()
        self.follow_restarts()

    def discard(self) -> None:
        """Discard the step in flight, if there is one."""
        if self.in_flight is not None and (plan := self.take_off()) is not None:
            self.spoil(plan)
            self.scheduler.discard()
            self.forget_finished()
            self.follow_restarts()
        else:
            self.scheduler.discard()

    def spoil(self, plan: StepPlan) -> None:
        """A step runs, but not to its end."""
        self.cache.spoil(plan)
        if self.states is not None:
            self.states.spoil(plan)
        self.lanes.reported_in_vain |= set(plan.released_slots)

    def abort(self, pick: int) -> None:
        """Abort a request that waits, runs, is in flight, has finished or is unknown."""
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
        """Check that every sequence finishes within a bound, and that everything is free afterwards."""
        self.discard()
        check(self)
        # Without aging, the oldest sequence is never preempted and computes at least one token per step; past a length,
        # it may start over once. With aging, the order changes slightly over time, but each change costs a sampled
        # token.
        bound = 2 * sum(each.request.max_num_tokens for each in self.unfinished.values())
        if self.sizes.aging_steps is not None:
            bound *= 2 + max((each.request.max_num_tokens for each in self.unfinished.values()), default=0)
        bound += 5 * len(self.unfinished)  # steps in which they wait for blocks from elsewhere
        if self.scheduler.retention is not None:  # or for kept ones
            bound += len(self.unfinished) + len(self.scheduler.retention._keeping)
        num_steps = 0
        while self.unfinished:
            num_steps += 1
            if self.store is not None:
                self.store.finish()
            assert num_steps <= bound
            self.commit([[0]])
            check(self)
        assert self.scheduler.plan() is None
        self.num_plans += 1
        self.check_that_nothing_is_held()
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert (self.pool.num_available, self.pool.num_used) == (self.pool.num_blocks, 0)
        self.check_that_all_slots_are_free()

    def advance_store(self) -> None:
        """Let the store read and write while others do something else."""
        if self.store is not None:
            self.store.advance()
            self.reached["blocks loaded"] = self.store.num_loaded

    def left(self) -> list[Sequence]:
        """The ended sequences that later ones may continue."""
        resumption = self.scheduler._resumption
        return [] if resumption is None else list(resumption._ended.values())

    def waiting(self) -> list[Expected]:
        """The sequences that could have a slot, if there was one."""
        parked = {each.sequence_id for each in self.scheduler.persistence.parked()}
        return [e for e in self.unfinished.values() if not e.is_running and e.sequence_id not in parked]

    def check_that_all_slots_are_free(self) -> None:
        """As many new sequences as one step can admit get the slots from 0, whose previous sequences are known to have
        ended."""
        self.now += self.sizes.retention or 0  # until when blocks may be kept from them
        num_newcomers = min(self.sizes.num_slots, self.pool.num_blocks // len(self.sizes.windows))
        for _ in range(num_newcomers):
            self.submit([9], 1)
        self.plan()
        assert self.in_flight is not None
        assert sorted(span.slot for span in self.in_flight.spans) == list(range(num_newcomers))
        self.commit([[0]])
        assert not self.unfinished

    def check_that_nothing_is_held(self) -> None:
        """After every sequence has ended and its slot was released, no runner holds anything."""
        for each in self.left():
            assert self.scheduler._resumption is not None
            self.scheduler._give_back(self.scheduler._resumption.take(each))
        release = self.scheduler.plan_release()
        assert self.scheduler.plan_release() is None
        if release is not None:
            self.lanes.take_in(release, [], set())
            for runner in self.runners:
                runner.take_in(release)
        assert [runner.slots for runner in self.runners] == [{}, {}]

    def take_off(self) -> StepPlan | None:
        """Take the step in flight, or one planned now; None if there is nothing to compute."""
        if self.in_flight is None:
            self.plan()
        plan, self.in_flight = self.in_flight, None
        return plan

    # --------------------------------------------------------------------------------- following the scheduler

    def follow_admissions(self) -> tuple[list[Expected], list[Expected], set[int]]:
        """The sequences that lost their slot in this plan, those that got one, and the slots of sequences that did
        both."""
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
                if each in preempted or each.sequence_id in self.preempted_in_vain:
                    readmitted.add(slot_of[each.sequence_id])
        self.reached["preemptions for a better one" if admitted else "preemptions for blocks"] += len(preempted)
        return preempted, admitted, readmitted

    def follow_reuse(self, preempted: list[Expected]) -> None:
        """A sequence may find more cached tokens than it left behind; reading them checks that they are correct. It may
        have forked from a sibling that this plan preempted afterwards."""
        for each in self.running():
            num_found = each.sequence.num_computed_tokens
            assert each.num_computed <= num_found < len(each.token_ids), "the last token is always computed"
            if num_found > each.num_computed:
                assert not each.wants_scores, "what is scored has to be computed"
                num_shared = len(each.request.prompt_token_ids) - 1
                sources = self.siblings(each) or [other for other in preempted if other.request is each.request]
                is_fork = num_found == num_shared and sources and self.states is None
                is_whole = num_found % self.sizes.block_size == 0 or not self.sizes.sharing
                assert is_fork or (self.sizes.prefix_caching and is_whole)
                self.reached["sequences that found something computed"] += 1
                each.num_computed = num_found

    def follow_early_forks(self) -> None:
        """A sequence that waits for a sibling is forked from it before the sibling ends."""
        for each in self.running():
            num_found = each.sequence.num_computed_tokens
            if num_found != each.num_computed:
                assert (each.num_computed, num_found) == (0, len(each.request.prompt_token_ids) - 1)
                each.num_computed = num_found
                self.reached["forks from a sibling that ends"] += 1

    def follow_restarts(self) -> None:
        """After a failed or discarded step, a sequence owes what it owed before, or everything if it relied on that
        step."""
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

    # --------------------------------------------------------------------------------- state

    def service_order(self, each: Expected) -> tuple[int, int]:
        """The order of service, as the policy defines it."""
        if each.is_background:
            return BACKGROUND, each.sequence_id
        if self.sizes.aging_steps is None:
            return 0, each.sequence_id
        return each.request.priority - (self.num_plans - each.arrival) // self.sizes.aging_steps, each.sequence_id

    def running(self) -> list[Expected]:
        return [each for each in self.unfinished.values() if each.is_running]

    def siblings(self, each: Expected) -> list[Expected]:
        """The other running sequences of the same request."""
        return [other for other in self.running() if other.request is each.request and other is not each]

    def past(self, each: Expected, end: int | Span) -> list[Place]:
        """The places of a sequence's first `end` tokens, or of all up to the end of a span, with its draft tokens."""
        beyond = self.sizes.recompute_beyond
        is_long = beyond is not None and len(each.token_ids) > beyond
        token_ids = each.token_ids[:end] if isinstance(end, int) else each.token_ids[: end.end]
        if not isinstance(end, int):
            token_ids = [*token_ids, *end.draft_token_ids]
        return [(i, token, is_long, each.request.cache_salt) for i, token in enumerate(token_ids)]

    def known_nodes(self) -> set[PrefixNode]:
        return set(self.pool._prefix_cache._nodes.values())

    def content_of(self, parent: Parent) -> tuple[Root, tuple[int, ...]]:
        """All tokens up to the end of a node's block, as recorded when the node was first seen."""
        if isinstance(parent, Root):
            return parent, ()
        if parent not in self.contents:
            root, before = self.content_of(parent.key[0])
            self.contents[parent] = root, (*before, *memoryview(parent.key[1]).cast("i"))
        return self.contents[parent]


def chosen_after(span: Span, sampled: list[int]) -> list[int]:
    """The tokens that a runner returns for a span, if its rows choose those of `sampled` in turn: up to the first that
    differs from its draft token. Without draft tokens, all of `sampled`."""
    if not span.num_draft_tokens:
        return sampled
    chosen = []
    for row, proposed in enumerate([*span.draft_token_ids, None]):
        chosen.append(sampled[row % len(sampled)])
        if chosen[-1] != proposed:
            break
    return chosen
