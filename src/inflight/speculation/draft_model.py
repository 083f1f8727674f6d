"""`DraftModelProposer`: drafts with a smaller model of the same vocabulary (Leviathan et al., 2023).

The model runs only on demand, and then first computes the tokens that it has not seen. It samples as the target model
will: with the request's temperature and filters, and with the same random number for each position. So acceptance is
about equal at every temperature.
"""

import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.plan import BlockTable, SlotAssignment, Span, StepPlan, StepTokens
from inflight.scheduling.draft_tokens import Candidate
from inflight.speculation.draft_cache import DraftCache, DraftLayout, extend
from inflight.speculation.drafter import NO_DRAFT, DraftTokens
from inflight.speculation.step_times import StepTimes


class Outcomes:
    """A running share of correct draft tokens.

    Args:
        memory: the decay of earlier outcomes at each new one.
    """

    def __init__(self, memory: float) -> None:
        self._memory = memory
        self._num_right = self._num_tried = 0.0

    def observe(self, is_right: bool) -> None:
        """A draft token was right, or not."""
        self._num_right = self._num_right * self._memory + is_right
        self._num_tried = self._num_tried * self._memory + 1.0

    def chance(self, prior: float, weight: float) -> float:
        """The chance that the next draft token is right; `prior`, known otherwise, counts as `weight` outcomes."""
        return (self._num_right + prior * weight) / (self._num_tried + weight)

    def fade(self, share: float) -> None:
        """Multiply the weight of earlier outcomes by `share`."""
        self._num_right *= share
        self._num_tried *= share


logger = logging.getLogger(__name__)

MEMORY, SEQUENCE_MEMORY = 0.99, 0.95
"""The decay of earlier outcomes, of all sequences and of one, at each new one."""
FORGETTING = 0.998
"""Their decay at each step that is better off without a draft, so that it is eventually tried again."""
PRIOR, PRIOR_WEIGHT = 0.7, 4.0
"""The prior acceptance rate, and its weight in outcomes."""
MOST_UNSEEN = 512
"""Unseen tokens that the draft model computes in a step, before it drafts."""
STEPS_TO_REPAY = 64
"""Steps over which that must pay off."""


class DraftRunner(Protocol):
    """A model that runs plans, with a cache of `DraftLayout.num_draft_blocks` blocks for each of its cache groups."""

    def run(self, plan: StepPlan) -> StepTokens:
        """Run one step."""
        ...


@dataclass(slots=True)
class DraftedSequence:
    """The proposer's state of a sequence.

    Attributes:
        hashes: for each of its tokens, a hash of the tokens up to it.
        outcomes: of its draft tokens.
        proposed: the last draft tokens, after its first `num_tokens` tokens.
        num_seen: tokens computed by then, draft tokens included.
    """

    hashes: "array[int]" = field(default_factory=lambda: array("q"))
    outcomes: Outcomes = field(default_factory=lambda: Outcomes(SEQUENCE_MEMORY))
    proposed: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_seen: int = 0


@dataclass(slots=True)
class Draft:
    """Draft tokens of one candidate, while they are generated."""

    candidate: Candidate
    table: BlockTable
    hashes: "array[int]"
    num_seen: int
    token_ids: list[int] = field(default_factory=list)

    def span(self, most: int) -> Span:
        """The next tokens to compute, at most `most`; the sequence's last one gives a draft token."""
        token_ids, start = self.candidate.token_ids, self.num_seen
        known = token_ids[start : start + most] if start < len(token_ids) else self.token_ids[start - len(token_ids) :]
        is_last = start + len(known) == len(self.hashes)
        return Span(self.candidate.sequence_id, self.candidate.slot, start, known, int(is_last), len(self.hashes))


class DraftModelProposer:
    """Drafts with a draft model, for all candidates of a step at once.

    Args:
        num_groups: the draft model's cache groups.
        max_num_tokens: of one of its steps.
        max_len: of a sequence, draft tokens included.
        vocab_size: of the target model.
        clock: seconds, for how long the draft model runs.
        keeps_drafts: whether the cache of an accepted draft token stays valid.
    """

    def __init__(
        self,
        runner: DraftRunner,
        layout: DraftLayout,
        num_groups: int,
        max_num_tokens: int,
        max_len: int,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        *,
        keeps_drafts: bool = True,
    ) -> None:
        self.times = StepTimes()
        self._runner = runner
        self._cache = DraftCache(layout)
        self._num_groups = num_groups
        self._max_unseen = min(MOST_UNSEEN, max_num_tokens)
        self._max_len = max_len
        self._vocab_size = vocab_size
        self._clock = clock
        self._keeps_drafts = keeps_drafts
        self._outcomes = Outcomes(MEMORY)
        self._has_failed = False
        self._drafted: dict[int, DraftedSequence] = {}
        self._in_slots = [-1] * self._cache.layout.max_num_seqs

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        """Drop the sequences that have ended."""
        for sequence_id in [each for each in self._drafted if not is_unfinished(each)]:
            del self._drafted[sequence_id]

    # ------------------------------------------------------------------------------------- whether it is worth it

    def chance(self, candidate: Candidate) -> float:
        """The acceptance rate expected for a sequence's draft tokens; 0 if it can have none."""
        if self._has_failed or len(candidate.token_ids) + candidate.max_draft_tokens > self._max_len:
            return 0.0
        drafted = self._drafted.setdefault(candidate.sequence_id, DraftedSequence())
        for proposed, token_id in zip(drafted.proposed, candidate.token_ids[drafted.num_tokens :], strict=False):
            for outcomes in (self._outcomes, drafted.outcomes):
                outcomes.observe(proposed == token_id)
            if proposed != token_id:
                break
        drafted.proposed = []
        return drafted.outcomes.chance(self._outcomes.chance(PRIOR, PRIOR_WEIGHT), PRIOR_WEIGHT)

    def seconds(self, candidates: Sequence[Candidate], length: int) -> float:
        """Seconds to draft `length` tokens for each candidate, after `chance`; 0: unknown yet."""
        of_step = self.times.seconds(len(candidates))
        if of_step is None:
            return 0.0
        num_unseen = sum(max(1, len(each.token_ids) - self._drafted[each.sequence_id].num_seen) for each in candidates)
        most = self._max_unseen
        catching_up = (self.times.seconds(min(num_unseen, most)) or of_step) * max(1.0, num_unseen / most)
        return length * of_step + max(0.0, catching_up - of_step) / STEPS_TO_REPAY

    def do_without(self) -> None:
        """A step is better off without a draft."""
        self._outcomes.fade(FORGETTING)

    # ------------------------------------------------------------------------------------- drafting

    def propose(self, candidates: Sequence[Candidate], length: int) -> list[DraftTokens]:
        """Propose up to `length` tokens for each candidate, after `chance`: fewer if one ends the sequence, none while
        many tokens are unseen."""
        drafts = [self._begin(each) for each in candidates]
        budget, spans = self._max_unseen, []
        for draft in sorted(drafts, key=lambda draft: len(draft.hashes) - draft.num_seen):
            if budget > 0:
                spans.append((draft, draft.span(budget)))
                budget -= spans[-1][1].length
        while spans:
            spans = [
                (draft, draft.span(1)) for draft in self._run(spans) if len(draft.token_ids) < _most(draft, length)
            ]
        return [self._end(draft) for draft in drafts]

    def _begin(self, candidate: Candidate) -> Draft:
        hashes, table = self._drafted[candidate.sequence_id].hashes, self._cache.table(candidate)
        extend(hashes, candidate.token_ids[len(hashes) :])
        num_seen = min(self._cache.num_seen(table, hashes), len(hashes) - 1)  # the last one is computed for its logits
        return Draft(candidate, table, hashes[:], num_seen)

    def _end(self, draft: Draft) -> DraftTokens:
        drafted, candidate = self._drafted[draft.candidate.sequence_id], draft.candidate
        drafted.num_seen = self._num_lasting(draft, draft.num_seen)
        if not draft.token_ids:
            return NO_DRAFT
        chance = self.chance(candidate)
        drafted.proposed, drafted.num_tokens = draft.token_ids, len(candidate.token_ids)
        return DraftTokens(draft.token_ids, [chance] * len(draft.token_ids))

    def _run(self, spans: Sequence[tuple[Draft, Span]]) -> list[Draft]:
        """Compute spans; return the drafts that got another token and may have more."""
        plan = StepPlan(
            tuple(span for _, span in spans),
            tuple(
                tuple(self._cache.in_group(draft.table, group) for draft, _ in spans)
                for group in range(self._num_groups)
            ),
            assignments=tuple(self._assignments(draft.candidate for draft, _ in spans)),
        )
        start = self._clock()
        try:
            chosen = self._runner.run(plan)
        except Exception:
            logger.exception("the draft model failed; from now on it drafts nothing")
            self._has_failed = True
            return []
        self.times.observe(plan.num_tokens, self._clock() - start)
        going_on = []
        for (draft, span), given in zip(spans, chosen, strict=True):
            self._cache.observe(draft.table, draft.hashes, span.start, span.end, self._num_lasting(draft, span.end))
            draft.num_seen = span.end
            for token_id in given.token_ids:
                if token_id < self._vocab_size and token_id not in draft.candidate.stop_token_ids:
                    draft.token_ids.append(token_id)
                    extend(draft.hashes, [token_id])
                    going_on.append(draft)
        return going_on

    def _num_lasting(self, draft: Draft, num_tokens: int) -> int:
        """The number of a sequence's first tokens that need no recomputation."""
        return num_tokens if self._keeps_drafts else min(num_tokens, len(draft.candidate.token_ids))

    def _assignments(self, candidates: Iterable[Candidate]) -> Iterator[SlotAssignment]:
        """Assignments of slots that have a new sequence for the draft model."""
        for each in candidates:
            if self._in_slots[each.slot] != each.sequence_id:
                self._in_slots[each.slot] = each.sequence_id
                asked = each.params
                params = SamplingParams(
                    temperature=asked.temperature, top_p=asked.top_p, top_k=asked.top_k, min_p=asked.min_p
                )
                yield SlotAssignment(
                    each.slot, each.sequence_id, each.sequence_index, (), each.num_prompt_tokens, params, each.seed
                )


def _most(draft: Draft, length: int) -> int:
    return min(length, draft.candidate.max_draft_tokens)
