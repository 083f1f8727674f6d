"""`SimulatedEngine`: an engine's loop with the real scheduler and block pool, and a cost model for step times.

Plans, blocks, preemptions and prefix hits are the engine's own, step by step; only the time is computed, and every
sequence gets exactly its given number of tokens. A generated token is its sequence's number, so that no two sequences
generate the same text. Therefore a prompt that repeats an earlier answer does not find it in the prefix cache here.
Draft tokens are accepted at random, at the caller's rate.

`AcceptanceRate`: how often there are draft tokens, and how often they are accepted; and a drafter with that rate.

The engine's own `Speculation` decides how many draft tokens run, by step costs on the virtual clock. The cost of
drafting itself is not simulated.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.step.cache_layout import ALL_TOKENS, CacheLayout
from inflight.contracts.step.plan import Span, StepPlan
from inflight.contracts.step.record import ArrivalRecord, StepRecord
from inflight.engine.step_feedback import PrefillLimit
from inflight.engine.step_watch import StepWatch
from inflight.observe.run_report import RunLog
from inflight.scheduling.draft_tokens import Candidate
from inflight.scheduling.scheduler import Scheduler
from inflight.scheduling.sequence import Request, Sequence
from inflight.simulate.requests import SimulatedRequest
from inflight.simulate.step_cost import Cost, StepLoad
from inflight.speculation import DraftTokens, Speculation
from inflight.speculation.drafter import NO_DRAFT

LARGEST_TOKEN = 0x7FFFFFFF
WRONG = -1


@dataclass(frozen=True, slots=True)
class AcceptanceRate:
    """The quality of draft tokens.

    Attributes:
        acceptance: probability that a draft token is accepted if those before it are.
        share: of a sequence's decodes, how many have draft tokens.
    """

    acceptance: float
    share: float = 1.0

    @classmethod
    def from_steps(cls, steps: Iterable[StepRecord]) -> "AcceptanceRate | None":
        """The rate of recorded steps; None: they have no draft tokens."""
        decodes = [span for step in steps for span in step.spans if span.kind == "decode"]
        drafts = [span for span in decodes if span.num_draft_tokens]
        if not drafts:
            return None
        num_right = sum(span.num_accepted for span in drafts)
        num_tried = sum(min(span.num_accepted + 1, span.num_draft_tokens) for span in drafts)
        return cls(num_right / num_tried, len(drafts) / len(decodes))


def generated_token(sequence_id: int) -> int:
    """The token that a simulated sequence consists of."""
    return sequence_id & LARGEST_TOKEN


class SimulatedDrafter:
    """A `Drafter` that is right at random, at a given rate."""

    def __init__(self, rate: AcceptanceRate, seed: int = 0) -> None:
        self._rate = rate
        self._rng = random.Random(seed)

    def propose(self, candidate: Candidate) -> DraftTokens:
        """See `Drafter`."""
        rate, rng, most = self._rate, self._rng, candidate.max_draft_tokens
        if rng.random() >= rate.share:
            return NO_DRAFT
        num_right = next((number for number in range(most) if rng.random() >= rate.acceptance), most)
        right = generated_token(candidate.sequence_id)
        return DraftTokens([right] * num_right + [WRONG] * (most - num_right), [rate.acceptance] * most)

    def keep_only(self, is_unfinished: Callable[[int], bool]) -> None:
        """See `Drafter`."""


DEFAULT_MODEL_LEN = 4096


def enough_blocks(config: EngineConfig, layout: CacheLayout) -> int:
    """Return the number of blocks in the cache: the configured one, or enough for every case."""
    if config.kv_cache.num_blocks is not None:
        return config.kv_cache.num_blocks
    return config.scheduling.max_num_seqs * layout.max_num_blocks(config.max_model_len or DEFAULT_MODEL_LEN)


@dataclass(slots=True)
class Expected:
    """The simulation's state of a request until its last sequence ends."""

    arrival: float
    num_output_tokens: tuple[int, ...]
    num_unfinished: int
    has_begun: bool = False


class SimulatedEngine:
    """One engine on a virtual clock that begins at 0.

    Args:
        config: only its scheduling options matter. `num_blocks` None: as many as all slots could ever fill.
        cost: the cost of steps.
        model: its cache layout, sharing and recomputation; None: a model that keeps and shares everything.
        observer: called with each step's record, in virtual time.
        acceptance_rate: how many draft tokens are accepted; None: no speculation.
        limits_prefill: whether prefill beside decodes is bounded as in a server, unless `config` bounds it.
        on_first_token, on_end: called with a request's id, at `clock`, when the first of its sequences gets its first
            token, and when the last one has ended.
    """

    def __init__(
        self,
        config: EngineConfig,
        cost: Cost,
        model: ModelInfo | None = None,
        observer: Callable[[StepRecord], None] | None = None,
        acceptance_rate: AcceptanceRate | None = None,
        *,
        limits_prefill: bool = False,
        on_first_token: Callable[[str], None] = lambda _: None,
        on_end: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.cost, self.observer = cost, observer
        self._speculation = None if acceptance_rate is None else self._speculate(acceptance_rate, config)
        groups = (ALL_TOKENS,) if model is None else model.cache_groups
        layout = CacheLayout(config.kv_cache.block_size, groups, config.scheduling.max_num_batched_tokens)
        self.scheduler = Scheduler.from_config(
            config,
            enough_blocks(config, layout),
            model,
            layout=layout,
            speculator=self._speculation,
            clock=lambda: self.clock,
        )
        self.pool = self.scheduler.block_pool
        self.log = RunLog(config.scheduling.max_num_seqs, self.pool.num_blocks)
        self.clock = 0.0
        self._prefill_limit: PrefillLimit | None = None
        if limits_prefill and config.scheduling.max_prefill_tokens_per_step is None:
            self._prefill_limit = PrefillLimit()
            self.scheduler.limit_prefill = self._prefill_limit.num_tokens
        self._on_first_token, self._on_end = on_first_token, on_end
        self._watch = StepWatch(self.scheduler)
        self._expected: dict[str, Expected] = {}
        self._uneven: set[str] = set()  # requests whose sequences get different numbers of tokens
        self._first_token_times: dict[int, float] = {}

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another step would do anything."""
        return bool(self._expected)

    def _speculate(self, rate: AcceptanceRate, config: EngineConfig) -> Speculation:
        """The engine's own choice of draft tokens. Drafting takes no time here."""
        return Speculation(SimulatedDrafter(rate, config.seed), config.speculation.max_draft_tokens, clock=lambda: 0.0)

    def submit(self, request: SimulatedRequest) -> None:
        """Queue a request. Raises `ValueError` if it could never fit the cache."""
        outputs, prompt = request.num_output_tokens, request.prompt_token_ids
        num_tokens = len(prompt) + max(outputs)
        if self.pool.layout.max_num_blocks(num_tokens - 1) > self.pool.num_blocks:
            capacity = self.pool.layout.longest_sequence(self.pool.num_blocks, num_tokens) + 1
            raise ValueError(
                f"request {request.request_id!r} grows to {num_tokens} tokens; the whole cache can only serve a "
                f"sequence of {capacity} ({self.pool.num_blocks} blocks of {self.pool.block_size} tokens)"
            )
        self._expected[request.request_id] = Expected(request.arrival, outputs, len(outputs))
        if len(set(outputs)) > 1:
            self._uneven.add(request.request_id)
        self.scheduler.submit(
            Request(request.request_id, prompt, num_tokens, num_sequences=len(outputs), priority=request.priority)
        )
        if self.observer is not None:
            arrival = ArrivalRecord(request.request_id, request.arrival, prompt, len(outputs), request.priority)
            self._watch.observe_arrival(arrival)

    def step(self, until: float = inf) -> bool:
        """Simulate a step, or time in which all sequences wait for kept blocks, up to `until`; False if there is
        nothing to do."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._run(plan)
            return True
        seconds = self.scheduler.idle_seconds
        self.clock = min(self.clock + seconds, max(self.clock, until))
        return seconds > 0

    def _run(self, plan: StepPlan) -> None:
        planned = None if self.observer is None else self._watch.observe_plan(plan)
        start, seconds = self.clock, self.cost.seconds(load_of_plan(plan))
        self.clock += seconds
        num_accepted = self.scheduler.count.accepted_tokens
        for step in self.scheduler.commit(plan, [_sampled(span) for span in plan.spans]):
            sequence = step.sequence
            if sequence.sequence_id not in self._first_token_times:
                self._first_token_times[sequence.sequence_id] = self.clock
                self._tell_first_token(sequence.request.request_id)
            if self._uneven and sequence.finish_reason is None:
                self._end_early(sequence)
            if sequence.finish_reason is not None:
                self._finish(sequence)
        if self._speculation is not None:
            num_draft_tokens = sum(span.num_draft_tokens for span in plan.spans)
            num_accepted = self.scheduler.count.accepted_tokens - num_accepted
            self.log.observe_draft_tokens(num_draft_tokens, num_accepted)
            num_sequences = sum(span.num_logit_rows > 0 for span in plan.spans)
            self._speculation.observe(plan.num_tokens, seconds, num_draft_tokens, num_accepted, num_sequences)
        self.log.observe_step(len(plan.spans), self.pool.num_used, seconds)
        if self.observer is not None and planned is not None:
            self.observer(self._watch.record(planned, self.log.num_steps - 1, start, seconds))

        prefills = sum(length for span in plan.spans if (length := span.length - span.num_draft_tokens) > 1)
        if self.scheduler.retention is not None and 2 * prefills > plan.num_tokens:
            self.scheduler.retention.observe_prefill(prefills, seconds)
        if self._prefill_limit is not None:
            self._prefill_limit.observe(plan.num_tokens - prefills, prefills, seconds)

    def _tell_first_token(self, request_id: str) -> None:
        expected = self._expected[request_id]
        if not expected.has_begun:
            expected.has_begun = True
            self._on_first_token(request_id)

    def _end_early(self, sequence: Sequence) -> None:
        """End a sequence that has all its tokens, if others of its request get more."""
        request_id = sequence.request.request_id
        if request_id in self._uneven:
            wanted = self._expected[request_id].num_output_tokens[sequence.index]
            if sequence.num_output_tokens >= wanted:
                self.scheduler.finish(sequence.sequence_id, "length", wanted)

    def _finish(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        expected = self._expected[request_id]
        first = self._first_token_times.pop(sequence.sequence_id)
        self.log.observe_sequence(expected.arrival, first, self.clock, expected.num_output_tokens[sequence.index])
        expected.num_unfinished -= 1
        if expected.num_unfinished == 0:
            del self._expected[request_id]
            self._uneven.discard(request_id)
            self._on_end(request_id)


def _sampled(span: Span) -> list[int]:
    """A span's new tokens."""
    if not span.num_logit_rows:
        return []
    token_id = generated_token(span.sequence_id)
    return [token_id] * (
        1
        + next(
            (n for n, draft_token in enumerate(span.draft_token_ids) if draft_token != token_id), span.num_draft_tokens
        )
    )


def load_of_plan(plan: StepPlan) -> StepLoad:
    """Return the load of a planned step. (Called very often, so it inlines `StepLoad.from_spans` for decodes.)"""
    decodes = [span.start for span in plan.spans if span.sequence_length == span.start + 1]
    others = [(s.start, len(s.token_ids), s.num_logit_rows) for s in plan.spans if s.sequence_length != s.start + 1]
    num_keys = sum(decodes) + len(decodes)
    rest = StepLoad.from_spans(others)
    return StepLoad(
        rest.num_tokens + len(decodes),
        rest.num_logit_rows + len(decodes),
        rest.num_context_tokens + num_keys,
        rest.num_attended_keys + num_keys,
    )
