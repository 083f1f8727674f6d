"""`simulate`: the engine's loop with the real scheduler and block pool, where a cost model says how long a step takes.

Plans, blocks, preemptions and prefix hits are the engine's own, step by step; only the time is computed, and every
sequence gets exactly its given number of tokens. A generated token is its sequence's number, so that no two sequences
generate the same text. Therefore a prompt that repeats an earlier answer does not find it in the prefix cache here.
Guessed tokens are right by chance, as often as the caller says.

With the policy "first come, first served", the scheduler gets no more requests than it could admit in a step: its
decisions are the same, and a million requests take no memory.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from inflight.contracts.cache_layout import ALL_TOKENS, CacheLayout
from inflight.contracts.config import EngineConfig
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.plan import Span, StepPlan
from inflight.contracts.record import ArrivalRecord, StepRecord
from inflight.engine.step_watch import StepWatch
from inflight.observe.run_report import RunLog, RunReport
from inflight.scheduling.scheduler import Scheduler
from inflight.scheduling.sequence import Request, Sequence
from inflight.simulate.guesses import GuessRate, SimulatedGuesser, generated_token
from inflight.simulate.requests import SimulatedRequest
from inflight.simulate.step_cost import Cost, StepLoad
from inflight.speculation import Speculation

DEFAULT_MODEL_LEN = 4096


def simulate(
    requests: Iterable[SimulatedRequest],
    config: EngineConfig,
    cost: Cost,
    *,
    model: ModelInfo | None = None,
    observer: Callable[[StepRecord], None] | None = None,
    guesses: GuessRate | None = None,
) -> RunReport:
    """Run requests to their ends on a virtual clock that begins at 0.

    Args:
        requests: in order of arrival; taken one by one as the clock advances.
        config: only its scheduling options matter. `num_blocks` None: as many as all slots could ever fill.
        cost: the cost of steps.
        model: says which keys and values of a sequence are kept and shared, and when it is computed anew; None: a model
            that keeps and shares everything.
        observer: called with each step's record, in virtual time.
        guesses: how good guessed tokens are; None: nothing is guessed.

    Raises:
        ValueError: a request could never fit the cache, or arrives earlier than the request before it.
    """
    return Simulation(requests, config, cost, model, observer, guesses).run()


def enough_blocks(config: EngineConfig, layout: CacheLayout) -> int:
    """Return the number of blocks in the cache: the configured one, or enough for every case."""
    if config.num_blocks is not None:
        return config.num_blocks
    return config.max_num_seqs * layout.max_num_blocks(config.max_model_len or DEFAULT_MODEL_LEN)


@dataclass(slots=True)
class Expected:
    """What the simulation remembers about a request until its last sequence has ended."""

    arrival: float
    num_output_tokens: tuple[int, ...]
    num_unfinished: int


class Simulation:
    """The state of one run; see `simulate`."""

    def __init__(
        self,
        requests: Iterable[SimulatedRequest],
        config: EngineConfig,
        cost: Cost,
        model: ModelInfo | None,
        observer: Callable[[StepRecord], None] | None,
        guesses: GuessRate | None = None,
    ) -> None:
        self.cost, self.observer = cost, observer
        self._speculation = None if guesses is None else self._guessing(guesses, config)
        groups = (ALL_TOKENS,) if model is None else model.cache_groups
        layout = CacheLayout(config.block_size, groups, config.max_num_batched_tokens)
        self.scheduler = Scheduler.of(
            config,
            enough_blocks(config, layout),
            None if model is None else model.recompute_beyond,
            can_share_prefixes=model is None or model.can_share_prefixes,
            layout=layout,
            speculator=self._speculation,
        )
        self.pool = self.scheduler.block_pool
        self.log = RunLog(config.max_num_seqs, self.pool.num_blocks)
        self.clock = 0.0
        self._watch = StepWatch(self.scheduler)
        submits_all = config.policy == "priority" or observer is not None  # records contain the number waiting
        self._most_waiting = float("inf") if submits_all else config.max_num_seqs
        self._incoming = iter(requests)
        self._next = next(self._incoming, None)
        self._began = 0.0 if self._next is None else self._next.arrival
        self._expected: dict[str, Expected] = {}
        self._uneven: set[str] = set()  # requests whose sequences get different numbers of tokens
        self._first_token_times: dict[int, float] = {}

    def _guessing(self, rate: GuessRate, config: EngineConfig) -> Speculation:
        """The engine's own decision how much is guessed. Guessing takes no time here."""
        return Speculation(SimulatedGuesser(rate, config.seed), config.max_guessed_tokens, clock=lambda: 0.0)

    def run(self) -> RunReport:
        """Run steps until all requests have finished."""
        scheduler = self.scheduler
        while True:
            self._submit_arrived()
            plan = scheduler.plan()
            if plan is not None:
                self._step(plan)
            elif self._next is not None and not self._expected:
                self.clock = self._next.arrival
            elif not self._expected:
                break
        return self.log.report(
            self.clock - self._began,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
        )

    def _submit_arrived(self) -> None:
        while (request := self._next) is not None and request.arrival <= self.clock:
            if self.scheduler.num_waiting >= self._most_waiting:
                return
            self._submit(request)
            self._next = next(self._incoming, None)
            if self._next is not None and self._next.arrival < request.arrival:
                raise ValueError(f"requests {request.request_id!r} and {self._next.request_id!r} are out of order")

    def _submit(self, request: SimulatedRequest) -> None:
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
            self._watch.see_arrival(arrival)

    def _step(self, plan: StepPlan) -> None:
        """Simulate one step and processes its results."""
        planned = None if self.observer is None else self._watch.see_plan(plan)
        start, seconds = self.clock, self.cost.seconds(load_of_plan(plan))
        self.clock += seconds
        num_accepted = self.scheduler.num_accepted_tokens
        for step in self.scheduler.commit(plan, [_sampled(span) for span in plan.spans]):
            sequence = step.sequence
            if sequence.sequence_id not in self._first_token_times:
                self._first_token_times[sequence.sequence_id] = self.clock
            if self._uneven and sequence.finish_reason is None:
                self._end_early(sequence)
            if sequence.finish_reason is not None:
                self._finish(sequence)
        if self._speculation is not None:
            num_guessed = sum(span.num_guessed for span in plan.spans)
            num_accepted = self.scheduler.num_accepted_tokens - num_accepted
            self.log.see_guesses(num_guessed, num_accepted)
            num_sequences = sum(span.num_logit_rows > 0 for span in plan.spans)
            self._speculation.see(plan.num_tokens, seconds, num_guessed, num_accepted, num_sequences)
        self.log.see_step(len(plan.spans), self.pool.num_used, seconds)
        if self.observer is not None and planned is not None:
            self.observer(self._watch.record(planned, self.log.num_steps - 1, start, seconds))

    def _end_early(self, sequence: Sequence) -> None:
        """End a sequence that has all its tokens, if it gets fewer than others of its request."""
        request_id = sequence.request.request_id
        if request_id in self._uneven:
            wanted = self._expected[request_id].num_output_tokens[sequence.index]
            if sequence.num_output_tokens >= wanted:
                self.scheduler.finish(sequence.sequence_id, "length", wanted)

    def _finish(self, sequence: Sequence) -> None:
        request_id = sequence.request.request_id
        expected = self._expected[request_id]
        first = self._first_token_times.pop(sequence.sequence_id)
        self.log.see_sequence(expected.arrival, first, self.clock, expected.num_output_tokens[sequence.index])
        expected.num_unfinished -= 1
        if expected.num_unfinished == 0:
            del self._expected[request_id]
            self._uneven.discard(request_id)


def _sampled(span: Span) -> list[int]:
    """The tokens that a span gives."""
    if not span.num_logit_rows:
        return []
    token_id = generated_token(span.sequence_id)
    return [token_id] * (
        1 + next((n for n, guess in enumerate(span.guessed_ids) if guess != token_id), span.num_guessed)
    )


def load_of_plan(plan: StepPlan) -> StepLoad:
    """Return the load of a planned step. (It inlines `StepLoad.of` for decodes, because it is called very often.)"""
    decodes = [span.start for span in plan.spans if span.sequence_length == span.start + 1]
    others = [(s.start, len(s.token_ids), s.num_logit_rows) for s in plan.spans if s.sequence_length != s.start + 1]
    num_keys = sum(decodes) + len(decodes)
    rest = StepLoad.of(others)
    return StepLoad(
        rest.num_tokens + len(decodes),
        rest.num_logit_rows + len(decodes),
        rest.num_context_tokens + num_keys,
        rest.num_attended_keys + num_keys,
    )
