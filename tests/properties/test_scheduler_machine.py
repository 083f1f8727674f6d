"""The scheduler under random workloads, held against a model so simple that it can be seen to be right.

`ModelCache` stands for the device: it writes what a plan says where the plan says, and reads each sequence's past back
through the plan's block table. A block that two sequences hold, or that was let go too early, reads as somebody else's.
"""

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from inflight.outputs import FinishReason
from inflight.plan import StepPlan
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.scheduler import Scheduler
from inflight.scheduling.sequence import Request, Sequence

NOBODY = -1
"""A sequence that never was."""

NO_STOP = 10
"""A token that ends nothing."""

tokens = st.integers(0, NO_STOP - 1)
"""What is sampled; the tokens of prompts are larger."""

samples = st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=4)
"""What a step gives to one span after the other, begun again when there are more; several tokens as by speculation."""

shapes = {
    "prompt_len": st.integers(1, 15),
    "max_output": st.integers(1, 30),
    "num_sequences": st.integers(1, 3),
    "stop_token_ids": st.frozensets(tokens, max_size=2),
    "min_output": st.integers(0, 4),
}
"""What a request may look like."""


class ModelCache:
    """For each place (block, offset): whose token was written there last, at which position, seen at what length."""

    def __init__(self, block_size: int, recompute_beyond: int | None) -> None:
        self.block_size = block_size
        self.recompute_beyond = recompute_beyond
        self.places: dict[tuple[int, int], tuple[int, int, int, bool]] = {}

    def run(self, plan: StepPlan) -> list[list[int]]:
        """Write the tokens of all spans, then read back, for each, its sequence's tokens up to the span's end."""
        spans = list(zip(plan.spans, plan.tables[0], strict=True))
        for span, table in spans:
            for position, token in enumerate(span.token_ids, span.start):
                entry = (span.sequence_id, position, token, self._is_long(span.sequence_length))
                self.places[self._place(table, position)] = entry
        pasts = []
        for span, table in spans:
            past = [self.places[self._place(table, position)] for position in range(span.end)]
            mine = [(span.sequence_id, position, self._is_long(span.sequence_length)) for position in range(span.end)]
            assert [(owner, position, is_long) for owner, position, _, is_long in past] == mine
            pasts.append([token for _, _, token, _ in past])
        return pasts

    def _place(self, table: "array[int]", position: int) -> tuple[int, int]:
        return table[position // self.block_size], position % self.block_size

    def _is_long(self, sequence_length: int) -> bool:
        return self.recompute_beyond is not None and sequence_length > self.recompute_beyond


@dataclass
class Expected:
    """What must be true of a sequence."""

    sequence: Sequence
    request: Request
    token_ids: list[int]
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    admission: int | None = None
    """How many were admitted before it; None while it waits."""
    finish_reason: FinishReason | None = None

    @property
    def num_owed(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    def take(self, sampled: list[int], recompute_beyond: int | None) -> list[int]:
        request, length_before = self.request, len(self.token_ids)
        for num_taken, token in enumerate(sampled, 1):
            self.token_ids.append(token)
            num_output = len(self.token_ids) - len(request.prompt_token_ids)
            if token in request.stop_token_ids and num_output >= request.min_output_tokens:
                self.end("stop")
                return sampled[:num_taken]
            if len(self.token_ids) == request.max_num_tokens:
                self.end("length")
                return sampled[:num_taken]
        if recompute_beyond is not None and length_before <= recompute_beyond < len(self.token_ids):
            self.num_computed_tokens = 0
        return sampled

    def end(self, reason: FinishReason) -> None:
        assert self.finish_reason is None, "a sequence finishes once"
        self.finish_reason = reason


@dataclass
class Lanes:
    """What somebody who sees only the plans knows of the slots: who has which."""

    max_num_seqs: int
    owners: dict[int, int] = field(default_factory=dict)
    perhaps_released: set[int] = field(default_factory=set)
    """Reported with a step that was discarded: may be reported again."""

    def take_in(self, plan: StepPlan, running: list[Sequence]) -> None:
        """Follow a plan, and check that the slots which it releases are those that were given up since the last."""
        now = {sequence.slot: sequence.sequence_id for sequence in running}
        assert len(now) == len(running), "no slot is given twice"
        given_up = {slot for slot, owner in self.owners.items() if now.get(slot) != owner}
        released = set(plan.released_slots)
        assert len(released) == len(plan.released_slots)
        assert given_up <= released <= given_up | self.perhaps_released
        self.perhaps_released.clear()
        for span in plan.spans:
            assert 0 <= span.slot < self.max_num_seqs
            assert now[span.slot] == span.sequence_id
        self.owners = {slot: owner for slot, owner in now.items() if slot is not None}


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, steps are planned and land in every way there is, sequences are ended at any time."""

    @initialize(
        num_blocks=st.integers(1, 12),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 20),
        recompute_beyond=st.none() | st.integers(1, 12),
        first=st.lists(st.fixed_dictionaries(shapes), max_size=4),
    )
    def open(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        recompute_beyond: int | None,
        first: list[dict[str, Any]],
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, max_num_seqs, budget, recompute_beyond)
        self.cache = ModelCache(block_size, recompute_beyond)
        self.lanes = Lanes(max_num_seqs)
        self.expected: dict[int, Expected] = {}
        self.in_flight: StepPlan | None = None
        self.num_requests = 0
        self.num_admissions = 0
        for shape in first:
            self.submit(**shape)

    # --------------------------------------------------------------------------------- what may happen

    @rule(**shapes)
    def submit(
        self, prompt_len: int, max_output: int, num_sequences: int, stop_token_ids: frozenset[int], min_output: int
    ) -> None:
        """A request that the door lets in: it can run to its end alone in the cache."""
        capacity = self.pool.num_blocks * self.pool.block_size + 1
        prompt_len = min(prompt_len, capacity - 1)
        prompt = [100 + self.num_requests + position for position in range(prompt_len)]
        max_num_tokens = min(prompt_len + max_output, capacity)
        request_id = f"request {self.num_requests}"
        request = Request(request_id, prompt, max_num_tokens, min_output, stop_token_ids, num_sequences)
        self.num_requests += 1
        self.scheduler.submit(request)
        new = [sequence for sequence in self.scheduler.sequences() if sequence.sequence_id not in self.expected]
        assert [sequence.index for sequence in new] == list(range(num_sequences))
        for sequence in new:
            assert sequence.sequence_id > max(self.expected, default=-1), "numbered in the order of submission"
            self.expected[sequence.sequence_id] = Expected(sequence, request, list(prompt))

    @rule()
    def plan(self) -> None:
        """Plan a step, and leave it in flight."""
        if self.in_flight is not None:
            with pytest.raises(RuntimeError, match="in flight"):
                self.scheduler.plan()
            return
        plan = self.scheduler.plan()
        if plan is None:
            assert not self.unfinished()
            return
        preempted, admitted = self.follow_admissions()
        self.check_who_was_preempted_and_who_admitted(preempted, admitted)
        self.check_what_is_computed(plan)
        self.check_that_the_budget_is_well_spent(plan, preempted)
        self.lanes.take_in(plan, self.running())
        self.in_flight = plan

    @rule(sampled=samples)
    def commit(self, sampled: list[list[int]]) -> None:
        """Land the step in flight, or one planned now."""
        if (plan := self.run_step()) is None:
            return
        rows = [sampled[i % len(sampled)] if span.num_logit_rows else [] for i, span in enumerate(plan.spans)]
        progress = self.scheduler.commit(plan, rows)
        given = []
        for span, row in zip(plan.spans, rows, strict=True):
            expected = self.expected[span.sequence_id]
            if expected.finish_reason is None:
                expected.num_computed_tokens = span.end
                if row:
                    new = expected.take(row, self.scheduler.recompute_beyond)
                    given.append((span.sequence_id, new, expected.finish_reason))
        assert given == [(p.sequence.sequence_id, p.new_token_ids, p.sequence.finish_reason) for p in progress]

    @rule(num_steps=st.integers(1, 12), sampled=samples)
    def run_steps(self, num_steps: int, sampled: list[list[int]]) -> None:
        """Several steps with nothing between, which lets long prompts and preempted sequences get somewhere."""
        for _ in range(num_steps):
            self.commit(sampled)
            self.everything_agrees()

    @rule()
    def fail(self) -> None:
        if (plan := self.run_step()) is None:
            return
        hit = [span.sequence_id for span in plan.spans if self.expected[span.sequence_id].finish_reason is None]
        assert [sequence.sequence_id for sequence in self.scheduler.fail(plan)] == hit
        for sequence_id in hit:
            self.expected[sequence_id].end("error")

    @rule()
    def discard(self) -> None:
        if self.in_flight is not None and (plan := self.run_step()) is not None:
            self.lanes.perhaps_released |= set(plan.released_slots)
        self.scheduler.discard()

    @rule(pick=st.integers(0, 30))
    def abort(self, pick: int) -> None:
        """Abort a request that waits, runs, is in flight, has finished or was never heard of."""
        unfinished = {expected.request.request_id for expected in self.unfinished().values()}
        candidates = [*sorted(unfinished), "request 0", "nobody"]
        request_id = candidates[pick % len(candidates)]
        hit = [i for i, expected in self.unfinished().items() if expected.request.request_id == request_id]
        assert sorted(sequence.sequence_id for sequence in self.scheduler.abort(request_id)) == hit
        for sequence_id in hit:
            self.expected[sequence_id].end("abort")

    @rule(pick=st.integers(0, 30), num_kept=st.none() | st.integers(0, 6))
    def finish(self, pick: int, num_kept: int | None) -> None:
        """End one sequence, perhaps with fewer tokens than it has, as a stop string does."""
        candidates = [*self.unfinished(), 0, NOBODY]
        sequence_id = candidates[pick % len(candidates)]
        ended = self.scheduler.finish(sequence_id, "stop", num_kept)
        if sequence_id not in self.unfinished():
            assert ended is None
            return
        expected = self.expected[sequence_id]
        assert ended is expected.sequence
        expected.end("stop")
        if num_kept is not None:
            expected.token_ids = expected.token_ids[: len(expected.request.prompt_token_ids) + num_kept]

    # --------------------------------------------------------------------------------- what must be true of a step

    def follow_admissions(self) -> tuple[list[Expected], list[Expected]]:
        """Who lost its slot in this plan, and who was given one."""
        preempted, admitted = [], []
        for expected in self.unfinished().values():
            if expected.sequence.num_preemptions > expected.num_preemptions:
                assert expected.admission is not None
                expected.num_preemptions += 1
                expected.num_computed_tokens = 0
                preempted.append(expected)
            elif expected.admission is None and expected.sequence.slot is not None:
                admitted.append(expected)
        return preempted, admitted

    def check_who_was_preempted_and_who_admitted(self, preempted: list[Expected], admitted: list[Expected]) -> None:
        for victim in preempted:
            assert victim.sequence.slot is None
            assert not admitted, "blocks given back belong to those who asked for them"
            for sequence in self.running():
                survivor = self.expected[sequence.sequence_id].admission
                assert survivor is not None
                assert victim.admission is not None
                assert victim.admission > survivor, "the last admitted goes first"
        for victim in preempted:
            victim.admission = None
        for expected in admitted:
            expected.admission = self.num_admissions
            self.num_admissions += 1
        served = [sequence.sequence_id for sequence in self.scheduler.sequences()]
        assert served == sorted(served), "first come, first served, and who was preempted comes first again"

    def check_what_is_computed(self, plan: StepPlan) -> None:
        assert 1 <= plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(plan.spans) == len({span.sequence_id for span in plan.spans}) <= self.scheduler.max_num_seqs
        assert len(plan.tables) == 1
        for span, table in zip(plan.spans, plan.tables[0], strict=True):
            expected = self.unfinished()[span.sequence_id]
            assert span.start == expected.num_computed_tokens
            assert list(span.token_ids) == expected.token_ids[span.start : span.end] != []
            assert span.sequence_length == len(expected.token_ids)
            assert span.num_logit_rows == (span.end == len(expected.token_ids))
            assert list(table) == list(expected.sequence.block_table)
            assert len(table) * self.pool.block_size >= span.end

    def check_that_the_budget_is_well_spent(self, plan: StepPlan, preempted: list[Expected]) -> None:
        """Decodes first; and nothing is left of the budget while somebody could have used it."""
        ends = {span.sequence_id: span.end for span in plan.spans}
        running = [self.expected[sequence.sequence_id] for sequence in self.running()]
        for expected in running:
            if expected.num_owed == 1:
                assert expected.sequence.sequence_id in ends, "a decode never waits"
        if plan.num_tokens == self.scheduler.max_num_batched_tokens:
            return
        for expected in running:
            assert expected.sequence.sequence_id in ends
            assert preempted or ends[expected.sequence.sequence_id] == len(expected.token_ids)
        waiting = [sequence for sequence in self.scheduler.sequences() if sequence.slot is None]
        if waiting and not preempted:
            no_slot = len(running) == self.scheduler.max_num_seqs
            assert no_slot or self.pool.num_blocks_for(len(waiting[0].token_ids)) > self.pool.num_available

    def run_step(self) -> StepPlan | None:
        """The forward pass of the step in flight, or of one planned now; None if there is nothing to compute.

        What it reads back must be the sequences' tokens, even of those that were ended meanwhile.
        """
        if self.in_flight is None:
            self.plan()
        if (plan := self.in_flight) is None:
            return None
        self.in_flight = None
        for span, past in zip(plan.spans, self.cache.run(plan), strict=True):
            expected = self.expected[span.sequence_id]
            kept = expected.token_ids[: span.end]  # a stop string may have cut the sequence behind its first tokens
            assert past[: len(kept)] == kept
            assert len(kept) == span.end or expected.finish_reason == "stop"
        return plan

    # --------------------------------------------------------------------------------- what must be true always

    @invariant()
    def everything_agrees(self) -> None:
        sequences = list(self.scheduler.sequences())
        unfinished = self.unfinished()
        assert sorted(sequence.sequence_id for sequence in sequences) == list(unfinished)
        unfinished_requests = {expected.request.request_id for expected in unfinished.values()}
        for expected in self.expected.values():
            sequence = expected.sequence
            assert sequence.token_ids == expected.token_ids
            assert sequence.finish_reason == expected.finish_reason
            request_id = expected.request.request_id
            assert self.scheduler.is_unfinished(request_id) == (request_id in unfinished_requests)
            if expected.finish_reason is None:
                assert sequence.num_computed_tokens == expected.num_computed_tokens
                assert (sequence.slot is None) == (expected.admission is None)
        for sequence in sequences[self.scheduler.num_running :]:
            assert (sequence.slot, list(sequence.block_table), sequence.num_computed_tokens) == (None, [], 0)
        for sequence in self.running():
            assert sequence.slot is not None
            assert self.lanes.owners[sequence.slot] == sequence.sequence_id, "a sequence keeps its slot while it runs"
            assert self.scheduler.running(sequence.sequence_id) is sequence
        assert self.scheduler.num_preemptions == sum(expected.num_preemptions for expected in self.expected.values())

    @invariant()
    def every_block_has_one_owner_or_is_free(self) -> None:
        tables = [sequence.block_table for sequence in self.scheduler.sequences()]
        if self.in_flight is not None:
            for span, table in zip(self.in_flight.spans, self.in_flight.tables[0], strict=True):
                if self.expected[span.sequence_id].finish_reason is not None:
                    tables.append(table)  # kept until the step in flight has landed
        held = [block for table in tables for block in table]
        assert len(held) == len(set(held))
        assert len(held) + self.pool.num_available == self.pool.num_blocks
        self.pool.check(tables)

    def teardown(self) -> None:
        """Everybody finishes within a bound, and then everything is free again."""
        if not hasattr(self, "scheduler"):
            return
        self.discard()
        # The oldest is never preempted and computes at least one token a step; past a length, it may start over once.
        computed = 1 if self.scheduler.recompute_beyond is None else 2
        bound = sum(computed * expected.request.max_num_tokens for expected in self.unfinished().values())
        num_steps = 0
        while self.unfinished():
            num_steps += 1
            assert num_steps <= bound
            self.run_steps(1, [[NO_STOP]])
        assert self.scheduler.plan() is None
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert self.pool.num_available == self.pool.num_blocks
        self.check_that_all_slots_are_free()
        event(f"preempted: {self.scheduler.num_preemptions > 0}")

    def check_that_all_slots_are_free(self) -> None:
        """As many newcomers as one step can take get the slots from 0, and whoever had them is known to be gone."""
        num_newcomers = min(self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens, self.pool.num_blocks)
        for _ in range(num_newcomers):
            self.submit(1, 1, 1, frozenset(), 0)
        self.plan()
        assert self.in_flight is not None
        assert sorted(span.slot for span in self.in_flight.spans) == list(range(num_newcomers))
        self.commit([[NO_STOP]])
        assert not self.unfinished()

    # --------------------------------------------------------------------------------- looking

    def unfinished(self) -> dict[int, Expected]:
        return {i: expected for i, expected in self.expected.items() if expected.finish_reason is None}

    def running(self) -> list[Sequence]:
        return list(self.scheduler.sequences())[: self.scheduler.num_running]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=400, stateful_step_count=40)


# ------------------------------------------------------------------------------------- whole workloads

Outcome = dict[tuple[str, int], tuple[list[int], str | None]]
"""For each request and index: the output, and why it ended."""


@dataclass(frozen=True)
class Engine:
    """The sizes that a workload runs with."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int


def next_token(past: list[int]) -> int:
    """A model: what follows depends on every token before, and on their order."""
    return sum((position + 1) * token for position, token in enumerate(past)) % 11


def run_to_the_end(requests: list[Request], engine: Engine, num_steps_between: int = 0) -> tuple[Outcome, Scheduler]:
    """Serve the requests, one coming every so many steps; each token is computed from what the cache holds."""
    scheduler = Scheduler(BlockPool(engine.num_blocks, engine.block_size), engine.max_num_seqs, engine.budget)
    cache = ModelCache(engine.block_size, None)
    outputs: dict[tuple[str, int], list[int]] = {}
    outcome: Outcome = {}
    to_come = list(requests)
    num_steps = 0
    while to_come or scheduler.num_running or scheduler.num_waiting:
        if to_come and num_steps >= num_steps_between * (len(requests) - len(to_come)):
            scheduler.submit(to_come.pop(0))
            continue
        num_steps += 1
        assert num_steps <= sum((request.max_num_tokens + num_steps_between) * 2 for request in requests)
        if (plan := scheduler.plan()) is None:
            continue
        pasts = cache.run(plan)
        sampled = [[next_token(past)] * span.num_logit_rows for span, past in zip(plan.spans, pasts, strict=True)]
        for progress in scheduler.commit(plan, sampled):
            key = (progress.sequence.request.request_id, progress.sequence.index)
            assert key not in outcome
            outputs.setdefault(key, []).extend(progress.new_token_ids)
            if progress.sequence.finish_reason is not None:
                outcome[key] = (outputs[key], progress.sequence.finish_reason)
    assert scheduler.block_pool.num_available == engine.num_blocks
    scheduler.block_pool.check([])
    return outcome, scheduler


def one_by_one(requests: list[Request]) -> Outcome:
    """What the requests must give: each computed by itself, without any scheduler."""
    outcome: Outcome = {}
    for request in requests:
        past, reason = list(request.prompt_token_ids), ""
        while not reason:
            past.append(next_token(past))
            num_output = len(past) - len(request.prompt_token_ids)
            if past[-1] in request.stop_token_ids and num_output >= request.min_output_tokens:
                reason = "stop"
            elif len(past) >= request.max_num_tokens:
                reason = "length"
        for index in range(request.num_sequences):
            outcome[request.request_id, index] = (past[len(request.prompt_token_ids) :], reason)
    return outcome


def make_requests(engine: Engine, draw: Callable[[int, int], int], num_requests: int) -> list[Request]:
    """Requests that each fit the cache alone; `draw(low, high)` chooses."""
    capacity = engine.num_blocks * engine.block_size + 1
    requests = []
    for number in range(num_requests):
        prompt_len = draw(1, min(12, capacity - 1))
        requests.append(
            Request(
                request_id=f"request {number}",
                prompt_token_ids=[20 + (5 * number + 3 * position) % 17 for position in range(prompt_len)],
                max_num_tokens=draw(prompt_len + 1, min(capacity, prompt_len + 30)),
                min_output_tokens=draw(0, 3),
                stop_token_ids=frozenset({draw(0, 40)}),  # often none of those that the model can say
                num_sequences=draw(1, 2),
            )
        )
    return requests


@settings(max_examples=300)
@given(st.randoms(use_true_random=False))
def test_a_random_workload_in_a_tiny_cache_gives_every_request_what_it_gets_alone(randomness: random.Random) -> None:
    draw = randomness.randint
    engine = Engine(num_blocks=draw(1, 12), block_size=draw(1, 4), max_num_seqs=draw(1, 6), budget=draw(1, 16))
    requests = make_requests(engine, draw, num_requests=draw(1, 10))
    outcome, scheduler = run_to_the_end(requests, engine, num_steps_between=draw(0, 3))
    assert outcome == one_by_one(requests)
    event(f"preemptions: {min(scheduler.num_preemptions, 5)}")


@pytest.mark.parametrize("seed", range(5))
def test_a_tiny_cache_preempts_and_gives_what_a_huge_one_gives(seed: int) -> None:
    tiny = Engine(num_blocks=8, block_size=3, max_num_seqs=6, budget=16)
    huge = Engine(num_blocks=1000, block_size=3, max_num_seqs=6, budget=16)
    requests = make_requests(tiny, random.Random(seed).randint, num_requests=12)
    in_tiny, tiny_scheduler = run_to_the_end(requests, tiny)
    in_huge, huge_scheduler = run_to_the_end(requests, huge)
    assert tiny_scheduler.num_preemptions > 0
    assert huge_scheduler.num_preemptions == 0
    assert in_tiny == in_huge == one_by_one(requests)
