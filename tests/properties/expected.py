"""What must be true of sequences and slots, stated as simply as possible."""

from collections.abc import Mapping
from dataclasses import dataclass

from inflight.contracts.api.config import BACKGROUND
from inflight.contracts.api.outputs import FinishReason
from inflight.contracts.step.cache_layout import CacheGroup, CacheLayout
from inflight.contracts.step.plan import StepPlan
from inflight.scheduling.sequence import Request, Sequence


@dataclass(frozen=True)
class Sizes:
    """The sizes of a scheduler."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    max_prefill: int | None = None
    background_tokens: int = 0
    aging_steps: int | None = None
    prefix_caching: bool = True
    max_scored: int = 256
    recompute_beyond: int | None = None
    windows: tuple[int | None, ...] = (None,)
    """The window of each cache group."""
    drafting: int | None = None
    """The seed of random draft tokens; None: there are none."""
    storing: int | None = None
    """The seed of a store outside of the cache; None: there is none."""
    retention: int | None = None
    """The most seconds for which blocks are kept for sessions; None: they are not."""
    sharing: bool = True
    """Whether sequences can share blocks; if not, they continue ended ones."""
    num_states: int = 0
    """The number of recurrent states; 0: there are none."""

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(self.block_size, tuple(map(CacheGroup, self.windows)), self.budget)

    @property
    def capacity(self) -> int:
        """The number of tokens of a sequence that runs to its end alone; its last token needs no place."""
        return self.layout.longest_sequence(self.num_blocks, 1000) + 1

    def first_seen(self, group: int, position: int) -> int:
        """The first position that a query at this position sees in one group."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    @property
    def num_slots(self) -> int:
        """No more sequences run than the budget of a step has tokens."""
        return min(self.max_num_seqs, self.budget, self.num_states // 2 or self.budget)


@dataclass(eq=False)
class Expected:
    """What must be true of a sequence."""

    sequence: Sequence
    request: Request
    token_ids: list[int]
    arrival: int
    """The number of steps planned before it arrived."""
    num_computed: int = 0
    num_computed_before: int = 0
    """The number before the step in flight."""
    num_scored: int = 1
    """The number of scored prompt tokens; the first token needs no score."""
    num_preemptions: int = 0
    is_running: bool = False
    finish_reason: FinishReason | None = None

    @property
    def is_background(self) -> bool:
        """Whether it runs only in what others leave."""
        return self.request.priority == BACKGROUND

    @property
    def sequence_id(self) -> int:
        return self.sequence.sequence_id

    @property
    def num_owed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def wants_scores(self) -> bool:
        is_first = self.sequence.index == 0
        return self.request.scores_prompt and is_first and self.num_scored < len(self.request.prompt_token_ids)

    def take(self, sampled: list[int]) -> list[int]:
        request = self.request
        for num_taken, token in enumerate(sampled, 1):
            self.token_ids.append(token)
            num_output = len(self.token_ids) - len(request.prompt_token_ids)
            if token in request.stop_token_ids and num_output >= request.min_output_tokens:
                self.end("stop")
                return sampled[:num_taken]
            if len(self.token_ids) == request.max_num_tokens:
                self.end("length")
                return sampled[:num_taken]
        return sampled

    def end(self, reason: FinishReason) -> None:
        assert self.finish_reason is None, "a sequence finishes once"
        self.finish_reason = reason


class Runner:
    """What a runner knows about its slots from plans alone: by slot, the sequence and its tokens on arrival."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[int, tuple[int, ...]]] = {}

    def take_in(self, plan: StepPlan) -> None:
        for slot in plan.released_slots:
            self.slots.pop(slot, None)
        for each in plan.assignments:
            self.slots[each.slot] = each.sequence_id, tuple(each.token_ids)

    def check(self, plan: StepPlan, sequences: list[Expected]) -> None:
        """Check that every span matches the sequence and the tokens that its slot is known to have."""
        assert len({each.slot for each in plan.assignments}) == len(plan.assignments)
        assert {each.slot for each in plan.assignments} <= {span.slot for span in plan.spans}
        for span, expected in zip(plan.spans, sequences, strict=True):
            sequence_id, token_ids = self.slots[span.slot]
            assert sequence_id == span.sequence_id
            if expected.finish_reason is not None:  # ended while the step was in flight, perhaps with fewer tokens
                continue
            assert token_ids == tuple(expected.token_ids[: len(token_ids)])
            assert len(token_ids) >= len(expected.request.prompt_token_ids)


class Lanes:
    """Which sequence has which slot, as known from plans alone."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.owners: dict[int, int] = {}
        self.reported_in_vain: set[int] = set()
        """Slots reported by a discarded step, which have to be reported again."""

    def take_in(
        self,
        plan: StepPlan,
        running: list[Expected],
        readmitted: set[int],
        left: Mapping[int, int | None] | None = None,
    ) -> None:
        """Follow a plan, and check that it releases the slots that were given up since the last plan.

        `readmitted`: slots of sequences that were preempted and admitted again by this plan, perhaps to the same one.
        `left`: the slots of ended sequences that later ones may continue, by the ended ones; None: blocks are shared.
        """
        now = {each.sequence.slot: each.sequence_id for each in running}
        assert len(now) == len(running), "no slot is given twice"
        released = set(plan.released_slots)
        given_up = {s for s, owner in self.owners.items() if now.get(s) != owner and owner not in (left or ())}
        if left is not None:
            given_up -= {each.sequence.slot for each in running if each.sequence.num_computed_tokens} - released
        assert len(released) == len(plan.released_slots)
        given_up |= self.reported_in_vain
        assert given_up <= released <= given_up | readmitted
        self.reported_in_vain.clear()
        for span in plan.spans:
            assert 0 <= span.slot < self.num_slots
            assert now[span.slot] == span.sequence_id
        held = [*now.items(), *((slot, owner) for owner, slot in (left or {}).items())]
        self.owners = {slot: owner for slot, owner in held if slot is not None}
