"""`Scheduler`: before every forward pass, decides which tokens of which sequences run.

There is no prefill phase and no decode phase. A running sequence owes the model its uncomputed tokens: one after a
decode, many after its admission or a preemption. Each step gives out the token budget in this order:

1. running sequences that owe one token, oldest first, so that no decode ever waits behind a prefill;
2. running sequences that owe more (a prompt in chunks), oldest first;
3. waiting sequences, first come first served, as long as budget, slots and blocks last.

When blocks run out, the sequence admitted last gives all of its own back and waits at the head of the queue, to be
recomputed later: the oldest always makes progress, so everybody finishes. Iteration-level scheduling is Orca's (Yu et
al., OSDI 2022), blocks and preemption by recomputation are vLLM's (Kwon et al., SOSP 2023), prompts in chunks beside
decodes are Sarathi's (Agrawal et al., 2023). Pure and deterministic: no tensor, no clock, no randomness.
"""

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from inflight.outputs import FinishReason
from inflight.plan import Span, StepPlan
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.sequence import Request, Sequence


@dataclass(frozen=True, slots=True)
class Progress:
    """What a committed step gave one sequence: its new tokens; `sequence.finish_reason` is set if it ended."""

    sequence: Sequence
    new_token_ids: list[int]


class Scheduler:
    """Decides, before every forward pass, which tokens run; owns all sequences until they are finished.

    Args:
        block_pool: the cache's blocks.
        max_num_seqs: slots.
        max_num_batched_tokens: the token budget of a step.
        recompute_beyond: a sequence that grows past so many tokens is computed anew from its start, because the model
            sees all of its tokens differently from then on (LongRoPE); None: no such length.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        recompute_beyond: int | None = None,
    ) -> None:
        self.block_pool = block_pool
        self.recompute_beyond = recompute_beyond
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_preemptions = 0
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self._running: OrderedDict[int, Sequence] = OrderedDict()  # in order of admission
        self._of_request: dict[str, dict[int, Sequence]] = {}  # its unfinished sequences
        self._free_slots = list(range(max_num_seqs))  # a heap: the lowest is taken first, so lanes stay together
        self._released_slots: set[int] = set()
        self._in_flight: StepPlan | None = None
        self._released_at_commit: list[Sequence] = []
        self._next_sequence_id = 0

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    def sequences(self) -> Iterator[Sequence]:
        """All unfinished sequences, running ones first, each group in the order in which it is served."""
        yield from self._running.values()
        yield from self._waiting.values()

    def running(self, sequence_id: int) -> Sequence:
        """The running sequence of this id. Raises `KeyError` if it is not running."""
        return self._running[sequence_id]

    def is_unfinished(self, request_id: str) -> bool:
        """Whether any sequence of the request still waits or runs."""
        return request_id in self._of_request

    def submit(self, request: Request) -> None:
        """Queue the request's sequences. The door has made sure that each can run to its end alone in the cache."""
        sequences = self._of_request[request.request_id] = {}
        for index in range(request.num_sequences):
            sequence = Sequence(self._next_sequence_id, request, index, list(request.prompt_token_ids))
            self._next_sequence_id += 1
            self._waiting[sequence.sequence_id] = sequences[sequence.sequence_id] = sequence

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute. To be committed or failed before the next call."""
        if self._in_flight is not None:
            raise RuntimeError("the step planned before is still in flight: commit or fail it first")
        lengths: dict[Sequence, int] = {}
        budget = self._schedule_running(lengths)
        self._admit_waiting(lengths, budget)
        if not lengths:
            return None
        self._in_flight = self._make_plan(lengths)
        return self._in_flight

    def commit(self, plan: StepPlan, tokens: SequenceOf[SequenceOf[int]]) -> list[Progress]:
        """Take in the tokens sampled for each span of `plan`: none for a chunk, one or more for the others.

        A sequence that was to get a token and could not is to be ended with `finish`, or it would wait for ever.
        Tokens of sequences that were finished or aborted while the step was in flight are dropped.
        """
        self._land(plan)
        progress = []
        for span, sampled in zip(plan.spans, tokens, strict=True):
            sequence = self._running.get(span.sequence_id)
            if sequence is None:
                continue
            sequence.num_computed_tokens = span.end
            if not sampled:
                continue
            new_token_ids = sequence.append(sampled)
            progress.append(Progress(sequence, new_token_ids))
            if sequence.finish_reason is not None:
                self._remove(sequence)
            elif self.recompute_beyond is not None and sequence.has_grown_past(self.recompute_beyond, new_token_ids):
                sequence.num_computed_tokens = 0
        return progress

    def discard(self) -> None:
        """Give up the step in flight, if there is one: nothing of it was computed, its spans are owed as before.

        Slots that it was to release are reported again; whoever they were given to since runs in the same plan.
        """
        if self._in_flight is not None:
            self._released_slots.update(self._in_flight.released_slots)
            self._land(self._in_flight)

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """Finish every sequence of a step that went wrong with "error"; returns them. Nothing of it is kept."""
        self._land(plan)
        failed = [sequence for span in plan.spans if (sequence := self._running.get(span.sequence_id)) is not None]
        for sequence in failed:
            self.finish(sequence.sequence_id, "error")
        return failed

    def finish(self, sequence_id: int, reason: FinishReason, num_tokens_kept: int | None = None) -> Sequence | None:
        """End a sequence from outside, with its first `num_tokens_kept` output tokens (None: all). None: unknown id."""
        sequence = self._running.get(sequence_id) or self._waiting.get(sequence_id)
        if sequence is None:
            return None
        if num_tokens_kept is not None:
            del sequence.token_ids[len(sequence.request.prompt_token_ids) + num_tokens_kept :]
        sequence.finish_reason = reason
        self._remove(sequence)
        return sequence

    def abort(self, request_id: str) -> list[Sequence]:
        """End all unfinished sequences of a request with "abort"; returns them, none if the request is unknown."""
        sequences = list(self._of_request.get(request_id, {}).values())
        for sequence in sequences:
            self.finish(sequence.sequence_id, "abort")
        return sequences

    # ---------------------------------------------------------------------------------------- planning

    def _schedule_running(self, lengths: dict[Sequence, int]) -> int:
        """Give running sequences their tokens, preempting the last admitted as needed; returns the budget left."""
        budget = self.max_num_batched_tokens
        for sequence in sorted(self._running.values(), key=lambda sequence: sequence.num_uncomputed_tokens > 1):
            length = min(sequence.num_uncomputed_tokens, budget)
            while sequence.slot is not None and not self._grow(sequence, length):
                victim = next(reversed(self._running.values()))
                budget += lengths.pop(victim, 0)
                self._preempt(victim)
            if sequence.slot is not None and length > 0:
                lengths[sequence] = length
                budget -= length
        return budget

    def _admit_waiting(self, lengths: dict[Sequence, int], budget: int) -> None:
        """Give slots to waiting sequences while there is budget for a token and room for all that they owe.

        (Who was preempted in this step heads the queue and does not fit: its blocks were asked for.)
        """
        while self._waiting and budget > 0 and self._free_slots:
            sequence = next(iter(self._waiting.values()))
            if self.block_pool.num_blocks_for(len(sequence.token_ids)) > self.block_pool.num_free:
                break
            length = min(sequence.num_uncomputed_tokens, budget)
            self._grow(sequence, length)
            sequence.slot = heapq.heappop(self._free_slots)
            self._running[sequence.sequence_id] = sequence
            del self._waiting[sequence.sequence_id]
            lengths[sequence] = length
            budget -= length

    def _make_plan(self, lengths: dict[Sequence, int]) -> StepPlan:
        spans: list[Span] = []
        tables: list[array[int]] = []
        for sequence, length in lengths.items():
            assert sequence.slot is not None
            start = sequence.num_computed_tokens
            end = start + length
            num_logit_rows = 1 if end == len(sequence.token_ids) else 0
            token_ids = sequence.token_ids[start:end]
            sequence_length = len(sequence.token_ids)
            spans.append(Span(sequence.sequence_id, sequence.slot, start, token_ids, num_logit_rows, sequence_length))
            tables.append(sequence.block_table[:])
        released_slots = tuple(sorted(self._released_slots))
        self._released_slots.clear()
        return StepPlan(tuple(spans), (tuple(tables),), released_slots=released_slots)

    def _grow(self, sequence: Sequence, length: int) -> bool:
        return self.block_pool.grow(sequence.block_table, sequence.num_computed_tokens + length)

    def _preempt(self, sequence: Sequence) -> None:
        """Take back everything that a running sequence holds; it waits at the head of the queue to be recomputed."""
        self._release(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting[sequence.sequence_id] = sequence
        self._waiting.move_to_end(sequence.sequence_id, last=False)

    # ---------------------------------------------------------------------------------------- letting go

    def _land(self, plan: StepPlan) -> None:
        """The step in flight is over: what was kept for it can go."""
        if plan is not self._in_flight:
            raise RuntimeError("this plan is not the step in flight")
        self._in_flight = None
        for sequence in self._released_at_commit:
            self._give_back(sequence)
        self._released_at_commit.clear()

    def _remove(self, sequence: Sequence) -> None:
        """Forget a finished sequence."""
        siblings = self._of_request[sequence.request.request_id]
        del siblings[sequence.sequence_id]
        if not siblings:
            del self._of_request[sequence.request.request_id]
        if sequence.slot is None:
            del self._waiting[sequence.sequence_id]
        else:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Take a running sequence's slot and blocks; those of a step in flight stay untouched until it is over."""
        del self._running[sequence.sequence_id]
        if self._in_flight is not None and any(s.sequence_id == sequence.sequence_id for s in self._in_flight.spans):
            self._released_at_commit.append(sequence)
        else:
            self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.block_pool.release(sequence.block_table)
        heapq.heappush(self._free_slots, sequence.slot)
        self._released_slots.add(sequence.slot)
        sequence.slot = None
