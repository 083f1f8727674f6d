"""`Scheduler`: picks the tokens of each step.

There is no prefill phase and no decode phase. A running sequence has uncomputed tokens: one after a decode, many when
it starts or after a preemption. Each step spends the token budget in this order:

1. running sequences with one uncomputed token, so that no decode ever waits for a prefill;
2. running sequences with more (a prompt in chunks);
3. waiting sequences, as long as budget, slots and blocks last.

Each group is in service order (`ServiceOrder`: by effective priority, if the policy has priorities, then by arrival).
Background sequences get tokens in the same order, in steps that no others need. When blocks run out, the last running
sequence is preempted: it frees all its blocks and waits to be recomputed. The first always makes progress, so every
sequence finishes.

A sequence that gets a prefill span is not preempted in the same plan: prefills are scheduled first to last, victims
last to first. So a later sequence can rely on blocks that an earlier one computes in the same step.

Before a sequence computes anything, it takes cached blocks (`Reuse`). The rest of the budget may go to draft tokens
(`DraftPlanner`). Cached blocks of a session that will soon return may be kept for it (`Retention`). Where blocks cannot
be shared, it may continue an ended sequence instead (`Resumption`).

Iteration-level scheduling is Orca's (Yu et al., OSDI 2022); blocks, forks and preemption by recomputation are vLLM's
(Kwon et al., SOSP 2023); prompts in chunks beside decodes are Sarathi's (Agrawal et al., 2023). Pure and deterministic:
no tensor, no clock but the one that `Retention` is given, no randomness.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal, Self

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.outputs import FinishReason
from inflight.contracts.step.cache_layout import CacheLayout
from inflight.contracts.step.multimodal import EncoderInput
from inflight.contracts.step.plan import NO_BLOCK, Span, StepPlan
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.draft_tokens import DraftPlanner, Speculator, num_accepted_tokens
from inflight.scheduling.persistence import BlockStore, Persistence
from inflight.scheduling.plan_making import make_plan
from inflight.scheduling.resumption import Resumption
from inflight.scheduling.retention import Retention
from inflight.scheduling.reuse import Reuse
from inflight.scheduling.sequence import Request, Sequence
from inflight.scheduling.sequences import Sequences, ServiceOrder
from inflight.scheduling.states import STATES_PER_SLOT

MOST_PASSING = 16
"""How many sequences may be looked at for one that can pass the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one scheduler's steps.

    Attributes:
        max_num_seqs: slots; at most `max_num_batched_tokens` are used, so that every decode gets its token.
        max_num_batched_tokens: the token budget of a step.
        max_prefill_tokens_per_step: the most prefill tokens beside decodes, or in the background; None: all that the
            decodes leave.
        background_tokens_per_step: the most tokens of background sequences beside others.
        max_scored_tokens: the most prompt tokens that a step scores: each needs a row of logits as wide as the
            vocabulary.
        recompute_beyond: a sequence that grows past this length is recomputed from its start, because its position
            embeddings change (LongRoPE); None: no such length.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens_per_step: int | None = None
    background_tokens_per_step: int = 0
    max_scored_tokens: int = 256
    recompute_beyond: int | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A sequence's new tokens from a committed step; `sequence.finish_reason` is set if it ended."""

    sequence: Sequence
    new_token_ids: list[int]


@dataclass(slots=True)
class Counters:
    """A scheduler's totals.

    Attributes:
        steps: that were planned.
        prompt_tokens: of all sequences that have had a slot, each counted once.
        drafts, draft_tokens, accepted_tokens: spans with draft tokens, draft tokens verified, and accepted.
    """

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Scheduler:
    """Picks the tokens of each step; owns all sequences until they finish.

    Args:
        block_pool: the cache's blocks.
        aging_steps: steps after which a waiting sequence gains one priority; None: first come, first
            served.
        enable_prefix_caching: whether blocks are found by content.
        sharing: what a sequence can continue from: "blocks" of others, the "slots" of ended ones, or "nothing".
        speculator: proposes draft tokens; None: no speculation.
        block_store: keeps blocks outside the cache; None: no store.
        retention: keeps blocks for sessions; None: cached blocks are evicted by recency alone.
        num_states: recurrent states of the cache: two for each slot, and checkpoints; 0: the model has none, or keeps
            them itself.

    Attributes:
        sequences: all unfinished ones.
        count: totals so far.
        limit_prefill: returns the `max_prefill_tokens_per_step` for a number of decodes, in the background or not;
            replaced when step times are measured.
        has_item: whether an image or sound is encoded, so that its placeholders can be computed.
        wanted_items: those that the last plan lacked, and what is needed with them; by digest, with a sequence that has
            the item.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        limits: Limits,
        *,
        aging_steps: int | None = None,
        enable_prefix_caching: bool = True,
        sharing: Literal["blocks", "slots", "nothing"] = "blocks",
        speculator: Speculator | None = None,
        block_store: BlockStore | None = None,
        retention: Retention | None = None,
        num_states: int = 0,
    ) -> None:
        self.block_pool = block_pool
        self.limits = limits
        self.limit_prefill: Callable[[int, bool], int | None] = lambda _, __: limits.max_prefill_tokens_per_step
        self.has_item: Callable[[EncoderInput], bool] = lambda _: True
        self.wanted_items: dict[bytes, tuple[int, EncoderInput]] = {}
        self.count = Counters()
        most_running = num_states // STATES_PER_SLOT or limits.max_num_seqs
        num_slots = min(limits.max_num_seqs, limits.max_num_batched_tokens, most_running)
        self.sequences = Sequences(ServiceOrder(aging_steps), num_slots)
        self.reuse = Reuse(
            block_pool,
            enable_prefix_caching,
            limits.recompute_beyond,
            can_share=sharing == "blocks",
            num_states=num_states,
            num_slots=num_slots,
        )
        self.retention = retention if self.reuse.enable_prefix_caching else None
        self._resumption = Resumption() if enable_prefix_caching and sharing == "slots" else None
        store = block_store if self.reuse.enable_prefix_caching else None
        self.persistence = Persistence(store, block_pool, self.reuse.find, self.reuse.states)
        if store is not None:
            self.reuse.save = self.persistence.save
            if self.reuse.states is not None:
                self.reuse.states.save = self.persistence.save_state
        self._draft_planner: DraftPlanner | None = None
        if speculator is not None:
            self._draft_planner = DraftPlanner(speculator, block_pool, limits.recompute_beyond)
        self._num_scorable_tokens = limits.max_scored_tokens  # left in the step being planned
        self._in_flight: StepPlan | None = None
        self._released_at_commit: list[Sequence] = []
        self._is_held_back = False  # whether a sequence could start, were it not for kept blocks

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        num_blocks: int,
        model: ModelInfo | None = None,
        *,
        layout: CacheLayout | None = None,
        speculator: Speculator | None = None,
        block_store: BlockStore | None = None,
        clock: Callable[[], float] | None = None,
    ) -> Self:
        """A scheduler for an engine's configuration, with a new pool of `num_blocks` blocks.

        Args:
            model: what it can share, and when it recomputes; None: it shares blocks, and never does.
            layout: how sequences lie in the cache; None: all of their tokens, in one cache group.
            clock: the time in seconds, for `Retention`; None: there is none. The others are as in `Scheduler`.
        """
        limits = Limits(
            max_num_seqs=config.scheduling.max_num_seqs,
            max_num_batched_tokens=config.scheduling.max_num_batched_tokens,
            max_prefill_tokens_per_step=config.scheduling.max_prefill_tokens_per_step,
            background_tokens_per_step=config.scheduling.background_tokens_per_step,
            recompute_beyond=None if model is None else model.recompute_beyond,
        )
        shares_blocks = model is None or model.can_share_prefixes
        layout = layout or CacheLayout(config.kv_cache.block_size, max_span=config.scheduling.max_num_batched_tokens)
        pool, most_seconds = BlockPool(num_blocks, layout), config.prefix_cache.retention
        return cls(
            pool,
            limits,
            aging_steps=config.scheduling.aging_steps if config.scheduling.policy == "priority" else None,
            enable_prefix_caching=config.prefix_cache.enabled,
            sharing="blocks" if shares_blocks else "slots" if model and model.can_resume else "nothing",
            speculator=speculator,
            block_store=block_store,
            retention=None if clock is None or not most_seconds else Retention(pool, most_seconds, clock),
            num_states=0 if model is None else model.num_states,
        )

    @property
    def idle_seconds(self) -> float:
        """For how long no sequence can run, because all wait for kept blocks; 0: one can."""
        is_idle = self._is_held_back and not self.sequences.running and not self.persistence.is_waiting
        return self.retention.seconds_left if is_idle and self.retention is not None else 0.0

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot, including preempted and parked ones."""
        return len(self.sequences.waiting) + sum(1 for _ in self.persistence.parked())

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self.sequences.running)

    @property
    def num_decodes(self) -> int:
        """Sequences with a slot and one token to compute."""
        return sum(sequence.num_uncomputed_tokens == 1 for sequence in self.sequences.running.values())

    def unfinished(self) -> Iterator[Sequence]:
        """All unfinished sequences, running ones first, each group in service order."""
        for group in (self.sequences.running.values(), self._without_slot()):
            yield from self.sequences.in_service_order(group, self.count.steps)

    def first_waiting(self, number: int) -> list[Sequence]:
        """The first sequences without a slot, in service order."""
        return self.sequences.first(number, self._without_slot(), self.count.steps)

    def running(self, sequence_id: int) -> Sequence:
        """The running sequence of this id. Raises `KeyError` if it is not running."""
        return self.sequences.running[sequence_id]

    def is_unfinished(self, request_id: str) -> bool:
        """Whether any sequence of the request still waits or runs."""
        return request_id in self.sequences.of_request

    def find(self, sequence_id: int) -> Sequence | None:
        """The unfinished sequence of this id, if any."""
        parked = (each for each in self.persistence.parked() if each.sequence_id == sequence_id)
        found = self.sequences.running.get(sequence_id) or self.sequences.waiting.get(sequence_id)
        return found or next(parked, None)

    def has_sequence(self, sequence_id: int) -> bool:
        """Whether this sequence still waits or runs."""
        return self.find(sequence_id) is not None

    def _without_slot(self) -> list[Sequence]:
        return [*self.sequences.waiting, *self.persistence.parked()]

    def submit(self, request: Request) -> None:
        """Queue the request's sequences. Admission has checked that each fits the cache to its end."""
        made = self.sequences.make(request, self.count.steps, self.block_pool)
        for sequence in made:
            self.reuse.forget_progress(sequence)
        if self.retention is not None:
            self.retention.arrived(made[0])
        if not self._may_load or not self.persistence.park(made):
            for sequence in made:
                self.sequences.waiting.push(sequence)

    @property
    def _may_load(self) -> bool:
        """Whether free blocks may be written to at once: no step still reads or copies them."""
        return self._in_flight is None and not self.reuse.copies

    def plan(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute. Commit, fail or discard it before the next call,
        which raises `RuntimeError` otherwise."""
        if self._in_flight is not None:
            raise RuntimeError("the previous step is still in flight: commit or fail it first")
        for sequence in self.persistence.take_in(may_load=self._may_load):
            self.sequences.waiting.push(sequence)
        self._is_held_back = False
        if self.retention is not None:
            self.retention.expire()
        lengths: dict[Sequence, int] = {}
        self._num_scorable_tokens = self.limits.max_scored_tokens
        self.wanted_items = {}
        if self._resumption is not None and (best := self.sequences.waiting.best(self.count.steps)) is not None:
            self._release_ended_for(best)
        running = self.sequences.in_service_order(self.sequences.running.values(), self.count.steps)
        self._make_room_for_the_best(running)
        budget, num_preemptions = self.limits.max_num_batched_tokens, self.count.preemptions
        for in_background in (False, True):
            if in_background and lengths:
                budget = min(budget - sum(lengths.values()), self.limits.background_tokens_per_step)
            if budget > 0:
                left = self._schedule_running(running, lengths, budget, in_background)
                if (
                    self.count.preemptions == num_preemptions
                ):  # otherwise the blocks are for the sequences that needed them
                    self._start_waiting(lengths, left, in_background)
        self.count.steps += 1
        if not lengths:
            return None
        num_groups, drafts, states = len(self.block_pool.layout.groups), self._propose(lengths), self.reuse.states
        uses = {} if states is None else states.plan(lengths, drafts)
        self._in_flight = make_plan(lengths, drafts, self.sequences.slots, num_groups, self.reuse.copies, uses)
        return self._in_flight

    def plan_release(self) -> StepPlan | None:
        """A plan without spans, which only announces released slots, for when nothing is left to compute. None if no
        slot was released since the last plan."""
        if self._in_flight is not None or not (released_slots := self.sequences.slots.take_released()):
            return None
        return StepPlan((), (), released_slots=released_slots)

    def commit(self, plan: StepPlan, tokens: SequenceOf[SequenceOf[int]]) -> list[Progress]:
        """Commit the sampled tokens of each span of `plan`: none for a chunk, one or more for the others.

        If no token could be sampled, the caller must end the sequence with `finish`, or it would wait forever. Tokens
        of sequences finished or aborted while the step was in flight are dropped.
        """
        self._release_step(plan)
        progress, beyond = [], self.limits.recompute_beyond
        for span, sampled in zip(plan.spans, tokens, strict=True):
            sequence = self.sequences.running.get(span.sequence_id)
            if sequence is None:
                continue
            new_token_ids = sequence.append(sampled)
            sequence.num_computed_tokens = span.end
            if span.num_draft_tokens:
                self._take_back_wrong(sequence, span, new_token_ids)
            sequence.num_scored_tokens += len(span.scored_ids)
            self.reuse.remember(sequence, sequence.num_computed_tokens)
            if self.reuse.states is not None:
                self.reuse.states.settle(sequence)
            if sequence.request.text is not None and sequence.num_uncomputed_tokens == 0:
                sequence.finish_reason = "stop"
            elif not new_token_ids:
                continue
            progress.append(Progress(sequence, new_token_ids))
            if sequence.finish_reason is not None:
                self._remove(sequence)
            elif beyond is not None and sequence.has_grown_past(beyond, new_token_ids):
                self.reuse.start_over(sequence)
        return progress

    def discard(self) -> None:
        """Discard the step in flight, if any: its spans are planned again. States of slots may have advanced in some
        layers, so these sequences start over."""
        if (plan := self._in_flight) is None:
            return
        self._release_failed_step(plan)
        if not self.reuse.can_share:
            for span in plan.spans:
                if (sequence := self.sequences.running.get(span.sequence_id)) is not None:
                    self.reuse.start_over(sequence)

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """End every sequence of a failed step with "error", and return them; the step leaves no trace."""
        self._release_failed_step(plan)
        running = (self.sequences.running.get(span.sequence_id) for span in plan.spans)
        failed = [sequence for sequence in running if sequence is not None]
        for sequence in failed:
            self.finish(sequence.sequence_id, "error")
        return failed

    def finish(self, sequence_id: int, reason: FinishReason, num_tokens_kept: int | None = None) -> Sequence | None:
        """End a sequence, keeping its first `num_tokens_kept` output tokens (None: all), and return it; None if no
        unfinished sequence has this id."""
        sequence = self.find(sequence_id)
        if sequence is None:
            return None
        if num_tokens_kept is not None:
            del sequence.token_ids[sequence.num_prompt_tokens + num_tokens_kept :]
        sequence.finish_reason = reason
        self._remove(sequence)
        return sequence

    def abort(self, request_id: str) -> list[Sequence]:
        """End all unfinished sequences of a request with "abort", and return them; none if the request is unknown."""
        sequences = self.sequences.for_request(request_id)
        for sequence in sequences:
            self.finish(sequence.sequence_id, "abort")
        return sequences

    # ---------------------------------------------------------------------------------------- planning

    def _make_room_for_the_best(self, running: list[Sequence]) -> None:
        """Preempt sequences of strictly lower priority for the first waiting one, if it lacks a slot or blocks that
        they can free. At most one sequence per step is served this way. A shared block is freed only when all its
        sequences are preempted.
        """
        if not running or (best := self.sequences.waiting.best(self.count.steps)) is None:
            return
        priority = self.sequences.order.effective_priority(best, self.count.steps)
        if self.sequences.order.effective_priority(running[-1], self.count.steps) <= priority:
            return
        takes_kept = self.retention is None or self.retention.may_take(best)
        num_missing, shared = self.reuse.num_missing_blocks(best, self._siblings(best), takes_kept=takes_kept)
        num_slots, num_victims, held = self.sequences.slots.num_free, 0, Counter[int]()
        if self._resumption is not None and (ended := self._resumption.find(best)) is not None:
            num_slots, num_missing = num_slots + 1, num_missing - ended.num_blocks
        while num_slots < 1 or num_missing > 0:
            if num_victims == len(running):
                return
            victim = running[-1 - num_victims]
            if self.sequences.order.effective_priority(victim, self.count.steps) <= priority:
                return
            num_victims += 1
            num_slots += 1
            blocks = [block for table in victim.block_tables for block in table if block != NO_BLOCK]
            held.update(blocks)
            given_back = (block for block in blocks if held[block] == self.block_pool.num_holders(block))
            usable = (block for block in given_back if takes_kept or not self.block_pool.is_kept(block))
            num_missing -= sum(block not in shared for block in usable)
        for _ in range(num_victims):
            self._preempt(running.pop())

    def _schedule_running(
        self, running: list[Sequence], lengths: dict[Sequence, int], budget: int, in_background: bool
    ) -> int:
        """Schedule running sequences, of the background or the others, preempting the last of all as needed; return the
        remaining budget.

        Prefills come after all decodes, in service order, so a scheduled prefill is never preempted by another:
        sequences that share its blocks can rely on it.
        """
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in running:
            if sequence.is_background == in_background:
                (decodes if sequence.num_uncomputed_tokens == 1 else prefills).append(sequence)
        for sequence in decodes:
            if budget > 0:
                budget -= self._schedule(sequence, 1, lengths, running)
        num_prefill_tokens = self.limits.max_num_batched_tokens
        if lengths or in_background:  # in the background, the next request waits for the end of this step
            limit = self.limit_prefill(sum(lengths.values()), in_background)
            num_prefill_tokens = num_prefill_tokens if limit is None else limit
        for sequence in prefills:
            if sequence.slot is not None and not self._waits_for_others(sequence):
                self.reuse.take(sequence, self._siblings(sequence))
                length = self._longest_span(sequence, min(budget, num_prefill_tokens), lengths)
                budget -= self._schedule(sequence, length, lengths, running)
                num_prefill_tokens -= lengths.get(sequence, 0)
        return min(budget, num_prefill_tokens)

    def _start_waiting(self, lengths: dict[Sequence, int], budget: int, in_background: bool) -> None:
        """Admit waiting sequences, of the background or the others, to slots, while there are blocks for all their
        uncomputed tokens, and budget for one.

        A sequence that waits for what others compute needs no budget, but must have its slot when that is computed.
        """
        while (sequence := self._first_with_room(in_background)) is not None:
            waits = self._waits_for_others(sequence)
            if sequence.request.runs_whole and sequence.num_uncomputed_tokens > budget and lengths:
                return  # a text longer than any budget runs alone
            if budget <= 0 and not waits:
                return
            self._take_slot(sequence)
            if sequence.num_preemptions == 0:
                self.count.prompt_tokens += sequence.num_prompt_tokens
            if not waits:
                self.reuse.take(sequence, self._siblings(sequence))
                if self.retention is not None:
                    self.retention.started(sequence.request)
                length = self._longest_span(sequence, budget, lengths)
                budget -= self._schedule(sequence, length, lengths, [sequence])

    def _first_with_room(self, in_background: bool) -> Sequence | None:
        """The first waiting sequence, of the background or the others, if there are blocks for it. If it lacks only
        those that are kept for sessions, some after it may go first."""
        now, retention = self.count.steps, self.retention
        first = self.sequences.waiting.best(now)
        if first is None or first.is_background != in_background:
            return None
        if (ended := self._release_ended_for(first)) is None and not self.sequences.slots.num_free:
            return None
        if not self._has_room(first, num_blocks=0 if ended is None else ended.num_blocks):
            return None
        if retention is None or retention.may_take(first) or self._has_room(first, takes_kept=False):
            return first
        self._is_held_back = True
        returned = [each for each in self.sequences.waiting if retention.has_returned(each)]
        for sequence in returned + self.sequences.first(MOST_PASSING, self.sequences.waiting, now):
            if sequence.is_background == in_background and self._has_room(
                sequence, takes_kept=retention.may_take(sequence)
            ):
                return sequence
        return None

    def _has_room(self, sequence: Sequence, *, takes_kept: bool = True, num_blocks: int = 0) -> bool:
        """Whether there are blocks for a waiting sequence's tokens, besides `num_blocks` that it will have."""
        missing, _ = self.reuse.num_missing_blocks(sequence, self._siblings(sequence), takes_kept=takes_kept)
        return missing <= num_blocks

    def _release_ended_for(self, sequence: Sequence) -> Sequence | None:
        """Return the ended sequence that a waiting one can continue, if any, and release others while it lacks a slot
        or blocks."""
        if (resumption := self._resumption) is None:
            return None
        ended = resumption.find(sequence)
        num_blocks = 0 if ended is None else ended.num_blocks
        while (ended is None and not self.sequences.slots.num_free) or not self._has_room(
            sequence, num_blocks=num_blocks
        ):
            if (other := resumption.take_first(but=ended)) is None:
                break
            self._give_back(other)
        return ended

    def _take_slot(self, sequence: Sequence) -> None:
        """Move a waiting sequence to a slot: that of an ended one that it continues, or a free one."""
        ended = None if self._resumption is None else self._resumption.find(sequence)
        if ended is None or self._resumption is None:
            self.sequences.start(sequence)
            return
        self.sequences.start(sequence, self._resumption.take(ended).slot)
        sequence.block_tables, ended.block_tables, ended.slot = ended.block_tables, sequence.block_tables, None
        self.block_pool.shrink(sequence.block_tables, ended.num_computed_tokens)
        self.reuse.take_over(sequence, ended.num_computed_tokens)

    def _longest_span(self, sequence: Sequence, budget: int, lengths: Mapping[Sequence, int]) -> int:
        """The number of a sequence's tokens that fit the budget; while its prompt is scored, also the limit of logit
        rows; up to an image that is not encoded. One whose tokens see each other may take all that the step has
        left."""
        if sequence.request.runs_whole:
            return sequence.num_uncomputed_tokens
        length = max(0, min(sequence.num_uncomputed_tokens, budget))
        if sequence.wants_scores:
            length = max(0, min(length, self._num_scorable_tokens))
        if (inputs := sequence.request.multimodal) is not None:
            start = sequence.num_computed_tokens
            limit = start + self.limits.max_num_batched_tokens - sum(lengths.values())
            end = inputs.end_of_step(start, start + length, limit)
            items = inputs.items_between(start, end)
            if (missing := next((item for item in items if not self.has_item(item)), None)) is not None:
                if sum(len(item.places) for _, item in self.wanted_items.values()) < self.limits.max_num_batched_tokens:
                    self.wanted_items.update({item.digest: (sequence.sequence_id, item) for item in items})
                before = max(start, missing.places[0])
                end = inputs.end_of_step(start, before, before)
            length = end - start
        return length

    def _schedule(self, sequence: Sequence, length: int, lengths: dict[Sequence, int], victims: list[Sequence]) -> int:
        """Schedule `length` tokens of a running sequence; while blocks are missing, preempt the last of `victims`,
        which may be the sequence itself. Returns the change of budget: preempted sequences return theirs."""
        num_returned = 0
        while sequence.slot is not None and not self._grow(sequence, length):
            if self._resumption is not None and (ended := self._resumption.take_first()) is not None:
                self._give_back(ended)
                continue
            victim = victims.pop()
            num_returned += lengths.pop(victim, 0)
            self._preempt(victim)
        if sequence.slot is None or length == 0:
            return -num_returned
        lengths[sequence] = length
        if sequence.wants_scores:
            self._num_scorable_tokens -= length
        if length > 1:
            self.reuse.remember(sequence, sequence.num_computed_tokens + length, in_flight=True)
        return length - num_returned

    def _propose(self, lengths: Mapping[Sequence, int]) -> Mapping[Sequence, SequenceOf[int]]:
        """Draft tokens to add to the planned spans; none without a speculator."""
        if self._draft_planner is None:
            return {}
        budget = self.limits.max_num_batched_tokens - sum(lengths.values())
        if self.reuse.states is not None:
            budget = min(budget, self.reuse.states.num_spare(lengths))
        return self._draft_planner.propose(lengths, budget)

    def _take_back_wrong(self, sequence: Sequence, span: Span, new_token_ids: SequenceOf[int]) -> None:
        """Of a span's draft tokens, only accepted ones count as computed."""
        num_right = num_accepted_tokens(span, new_token_ids)
        sequence.num_computed_tokens -= span.num_draft_tokens - num_right
        self.block_pool.shrink(sequence.block_tables, sequence.num_computed_tokens)
        sequence.num_draft_tokens += span.num_draft_tokens
        sequence.num_accepted_tokens += num_right
        self.count.drafts += 1
        self.count.draft_tokens += span.num_draft_tokens
        self.count.accepted_tokens += num_right

    def _grow(self, sequence: Sequence, length: int) -> bool:
        num_computed = sequence.num_computed_tokens
        # Keep one token more than will be seen, so that a sibling can continue from the prompt's last one.
        if self.block_pool.lets_go:
            self.block_pool.release_before(sequence.block_tables, max(0, num_computed - 1))
        return self.block_pool.grow(sequence.block_tables, num_computed + length)

    def _preempt(self, sequence: Sequence) -> None:
        """Preempt a running sequence: free its slot and blocks, and queue it."""
        self._release(sequence)
        self.reuse.forget_progress(sequence)
        sequence.num_preemptions += 1
        self.count.preemptions += 1
        self.sequences.waiting.push(sequence)

    def _siblings(self, sequence: Sequence) -> Iterator[Sequence]:
        return self.sequences.siblings_of(sequence)

    def _waits_for_others(self, sequence: Sequence) -> bool:
        """Whether an earlier sibling is computing the prompt for both, or with recurrent states, this step the state
        that the sequence can continue from."""
        if sequence.num_blocks or sequence.num_prompt_tokens == 1 or not self.reuse.can_share:
            return False
        if self.reuse.states is not None:
            return self.reuse.waits_for_state(sequence)
        if self.reuse.fork_source(sequence, self._siblings(sequence)) is not None:
            return False
        return any(
            sibling.sequence_id < sequence.sequence_id and self.reuse.is_computing_prompt(sibling)
            for sibling in self._siblings(sequence)
        )

    # ---------------------------------------------------------------------------------------- releasing

    def _release_step(self, plan: StepPlan) -> None:
        """Release the resources of the step in flight at its end."""
        if plan is not self._in_flight:
            raise RuntimeError("this plan is not the step in flight")
        self._in_flight = None
        self.reuse.step_succeeded()
        if not self._released_at_commit:
            return
        ends = {span.sequence_id: span.end - span.num_draft_tokens for span in plan.spans}
        for sequence in self._released_at_commit:
            sequence.num_computed_tokens = ends[sequence.sequence_id]
            if self.reuse.states is not None:
                self.reuse.states.settle(sequence)
            self._leave(sequence)
        self._released_at_commit.clear()

    def _release_failed_step(self, plan: StepPlan) -> None:
        """The step in flight failed: sequences that relied on it start over, and its slot changes are announced again,
        since the runner may not have applied them."""
        self.sequences.slots.undo([each.slot for each in plan.assignments], plan.released_slots)
        for ended in self._released_at_commit:
            self._give_back(ended)
        self._released_at_commit.clear()
        changed = self.reuse.step_failed()
        self._release_step(plan)
        for span in plan.spans:
            if span.num_draft_tokens and (sequence := self.sequences.running.get(span.sequence_id)) is not None:
                self.block_pool.shrink(sequence.block_tables, span.end - span.num_draft_tokens)
        for sequence in changed:
            if sequence.slot is not None:
                self.reuse.start_over(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """Remove a finished sequence, after forking siblings that wait for its prompt."""
        if sequence.slot is not None and self._in_flight is None:
            for sibling in self._siblings(sequence):
                if sibling.num_blocks == 0 and self.reuse.fork_source(sibling, self._siblings(sibling)) is sequence:
                    self.reuse.fork(sibling, sequence)
        self.sequences.forget(sequence)
        if self.retention is not None:
            self.retention.ended(sequence)
        if sequence.slot is not None:
            self._release(sequence)
        elif not self.persistence.unpark(sequence):
            self.sequences.waiting.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Free a running sequence's slot and blocks, or do so once the step in flight is over."""
        del self.sequences.running[sequence.sequence_id]
        if self._in_flight is not None and any(s.sequence_id == sequence.sequence_id for s in self._in_flight.spans):
            self._released_at_commit.append(sequence)
        else:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """A sequence runs no longer: keep it for a later one to continue, or free its slot and blocks."""
        request = sequence.request
        has_ended = (
            sequence.finish_reason not in (None, "error") and request.text is None and not request.left_to_generate
        )
        if self._resumption is not None and has_ended and sequence.num_computed_tokens:
            self._resumption.keep(sequence)
        else:
            self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self.reuse.give_back(sequence)
        self.sequences.slots.give_back(sequence.slot)
        sequence.slot = None
