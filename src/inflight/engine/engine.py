"""`Engine`: submit, abort, step. The loop, and the only door between scheduling and execution.

One step: the scheduler plans it, the runner runs it and samples tokens, the scheduler takes them in. Data goes one way,
with two edges back that only the engine has: a stop string found in the text ends its sequence before another step is
run, and an abort. Knows requests in tokens; turning prompts into tokens and tokens into text is its callers' work.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import chain

from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import InvalidRequestError, QueueFullError
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.outputs import SequenceOutput, TokenScore
from inflight.contracts.params import SamplingParams
from inflight.contracts.plan import StepPlan, StepTokens
from inflight.contracts.record import ArrivalRecord, EngineStats, StepRecord
from inflight.engine.admission import make_request
from inflight.engine.deadlines import Deadlines
from inflight.engine.prefill_limit import PrefillLimit
from inflight.engine.step_watch import StepWatch
from inflight.execution.hf.load import ModelSource
from inflight.execution.model_runner import ModelRunner
from inflight.execution.sampling.sampler import INVALID_TOKEN
from inflight.grammar.constraints import Constraints
from inflight.grammar.matcher import GrammarMatcher
from inflight.scheduling.scheduler import Scheduler
from inflight.scheduling.sequence import Request, Sequence
from inflight.text.output_text import OutputText
from inflight.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A request that has passed the door: what the scheduler needs of it, and what the sampler needs."""

    request: Request
    params: SamplingParams
    seed: int
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarMatcher | None = None
    deadline: float | None = None


@dataclass(slots=True)
class LiveRequest:
    """What the engine keeps of a request until its last sequence has ended; lists are by sequence index."""

    accepted: AcceptedRequest
    first_scheduled_times: list[float | None]
    stop_texts: list[OutputText | None]
    """Each sequence's text so far, if stop strings have to be looked for."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """Of its prompt, until they are told."""


@dataclass(frozen=True, slots=True)
class News:
    """Something happened to a sequence that its caller has not heard of yet."""

    sequence: Sequence
    new_token_ids: list[int]
    scores: SequenceOf[TokenScore] = ()
    error: str | None = None


class Engine:
    """Runs requests on one model, step by step. Not thread-safe: one caller at a time.

    Args:
        model: hub id, folder, or a loaded model.
        config: how to load it and how to batch.
        tokenizer: to look for stop strings with; without it, requests that have some are refused.

    Raises:
        ModelError: the model cannot be loaded, or cannot be run exactly.
    """

    def __init__(self, model: ModelSource, config: EngineConfig, tokenizer: Tokenizer | None = None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.runner = ModelRunner(model, config)
        self.model_info = self._describe()
        info = self.model_info
        self.scheduler = Scheduler.of(
            config,
            info.num_blocks,
            info.recompute_beyond,
            can_share_prefixes=info.can_share_prefixes,
            layout=self.runner.cache_layout,
        )
        self.prefill_limit: PrefillLimit | None = None
        """If set, learns from every step how much prefill the next may have."""
        self.constraints = Constraints(tokenizer, self.model_info)
        self._deadlines = Deadlines()
        self._watch = StepWatch(self.scheduler)
        self.observer: Callable[[StepRecord], None] | None = None
        """Called after each step with its record; while it is None no record is made."""
        self._requests: dict[str, LiveRequest] = {}
        self._news: deque[News] = deque()
        self._outbox: list[SequenceOutput] = []
        self._slot_owners = [-1] * config.max_num_seqs
        self._num_steps = 0
        self._num_accepted = 0
        self._num_requests = 0
        self._num_generated_tokens = 0

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another step would do something."""
        return bool(self._requests)

    def _describe(self) -> ModelInfo:
        """What was found out about the model; one that names no EOS of its own takes its tokenizer's."""
        info, eos_token_id = self.runner.info, self.tokenizer.eos_token_id if self.tokenizer else None
        if info.eos_token_ids or eos_token_id is None or eos_token_id >= info.vocab_size:
            return info
        return replace(info, eos_token_ids=(eos_token_id,))

    def default_sampling_params(self) -> SamplingParams:
        """What the model's `generation_config` asks for, else `SamplingParams()`."""
        asked = self.runner.generation_config.to_diff_dict()
        defaults = {
            name: asked[name] for name in ("temperature", "top_k", "top_p", "min_p") if asked.get(name) is not None
        }
        if asked.get("do_sample") is False:
            defaults = {"temperature": 0.0}
        if asked.get("max_new_tokens") is not None:
            defaults["max_tokens"] = asked["max_new_tokens"]
        return SamplingParams(**defaults)

    # ------------------------------------------------------------------------------------- requests

    def accept(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
    ) -> AcceptedRequest:
        """Check a request and resolve it against the model, but for its grammar (`compile`); nothing is queued.

        Raises `InvalidRequestError`.

        Args:
            priority: lower runs first, where the engine's policy is "priority".
            cache_salt: only requests of the same salt share cached prefixes.
            deadline: a time of `time.monotonic()` at which it is aborted, if it has not finished.
        """
        if request_id in self._requests:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by an unfinished request")
        if params.stop_strings and self.tokenizer is None:
            raise InvalidRequestError(f"stop is {params.stop!r}, but this model has no tokenizer to find text with")
        if params.bad_words and self.tokenizer is None:
            raise InvalidRequestError(f"bad_words is {params.bad_words!r}, but this model has no tokenizer")
        request = make_request(
            request_id, prompt_token_ids, params, self.model_info, priority=priority, cache_salt=cache_salt
        )
        self._num_accepted += 1
        seed = params.seed
        if seed is None:
            seed = random.Random(f"{self.config.seed} {self._num_accepted}").getrandbits(63)
        return AcceptedRequest(request, params, seed, self._spelled(params.bad_words or ()), deadline=deadline)

    def compile(self, accepted: AcceptedRequest) -> AcceptedRequest:
        """The request with the grammar that its output must follow, if it asks for one. Raises `InvalidRequestError`.

        It may take seconds, and may be called by other threads."""
        if accepted.params.structured_output is None or accepted.grammar is not None:
            return accepted
        return replace(accepted, grammar=self.constraints.compile(accepted.params))

    def _spelled(self, words: SequenceOf[str]) -> tuple[tuple[int, ...], ...]:
        """All ways to write some words in tokens that the model has."""
        if self.tokenizer is None:
            return ()
        spelled = chain.from_iterable(map(self.tokenizer.spellings, words))
        return tuple(token_ids for token_ids in spelled if max(token_ids) < self.model_info.vocab_size)

    def submit(self, accepted: AcceptedRequest) -> None:
        """Queue a request that has passed the door. Raises `QueueFullError` if too many wait already."""
        self.check_room(accepted)
        accepted = self.compile(accepted)
        stop_texts = [self._stop_text(accepted) for _ in range(accepted.params.n)]
        live = LiveRequest(accepted, [None] * accepted.params.n, stop_texts)
        self._requests[accepted.request.request_id] = live
        self._num_requests += 1
        self.scheduler.submit(accepted.request)
        if self.observer:
            self._watch.see_arrival(self._arrival_record(accepted.request))
        if accepted.deadline is not None:
            self._deadlines.add(accepted.request.request_id, accepted.deadline)

    def check_room(self, accepted: AcceptedRequest) -> None:
        """Raise `QueueFullError` if too many wait already."""
        limit, num_waiting = self.config.max_num_waiting, self.scheduler.num_waiting
        if limit is not None and num_waiting + accepted.params.n > limit:
            raise QueueFullError(f"{num_waiting} sequences wait already, and at most {limit} may; try again later")

    def abort(self, request_id: str) -> list[SequenceOutput]:
        """End a request's unfinished sequences, and forget it; nothing happens if it is unknown.

        What an interrupt kept back of it is not told any more."""
        aborted = self.scheduler.abort(request_id)
        live = self._requests.pop(request_id, None)
        self._news = deque(news for news in self._news if news.sequence.request.request_id != request_id)
        self._outbox = [output for output in self._outbox if output.request_id != request_id]
        for sequence in aborted:
            self.constraints.remove(sequence.sequence_id)
        return [self._output(sequence, [], live) for sequence in aborted if live is not None]

    # ------------------------------------------------------------------------------------- the loop

    def step(self) -> list[SequenceOutput]:
        """Run one step; returns what every sequence with new tokens, or an end, got from it.

        An error in the forward pass ends the sequences of its step with "error", a row of logits that is not finite
        only its own sequence; the engine goes on. After an interrupt the step is as if it had not run, or its outputs
        come with those of the next.
        """
        start_time = time.monotonic()
        for request_id in self._deadlines.due(start_time):
            self._expire(request_id, start_time)
        try:
            plan = self.scheduler.plan()
            if plan is not None:
                self._welcome(plan, start_time)
                planned = self._watch.see_plan(plan) if self.observer else None
                self._run(plan)
        except BaseException:
            self.scheduler.discard()
            raise
        while self._news:
            self._outbox.append(self._report(self._news[0]))
            self._news.popleft()
        if plan is not None:
            self._num_steps += 1
            if self.prefill_limit is not None:
                self._learn(plan, time.monotonic() - start_time)
            if self.observer and planned is not None:
                duration = time.monotonic() - start_time
                self.observer(self._watch.record(planned, self._num_steps - 1, start_time, duration))
        outputs, self._outbox = self._outbox, []
        self._num_generated_tokens += sum(len(output.new_token_ids) for output in outputs)
        return outputs

    def _run(self, plan: StepPlan) -> None:
        """Run a plan and take in what came of it."""
        masks = self.constraints.begin(plan, self._output_of)
        try:
            given = self.runner.run(plan, None if masks is None else masks.result)
        except Exception as error:
            logger.exception("a step of %d tokens failed", plan.num_tokens)
            self._news += [News(sequence, [], error=repr(error)) for sequence in self.scheduler.fail(plan)]
            return
        rows = iter(given.token_ids)
        of_spans = [[next(rows) for _ in range(span.num_logit_rows)] for span in plan.spans]
        valid = [[] if INVALID_TOKEN in row else row for row in of_spans]
        sampled = [row[len(span.scored_ids) :] for span, row in zip(plan.spans, valid, strict=True)]
        scores = self._take_scores(plan, given) if given.scores else {}
        progress = self.scheduler.commit(plan, sampled)
        self._news += [
            News(
                step.sequence, step.new_token_ids, scores.get(step.sequence.sequence_id, [])[: len(step.new_token_ids)]
            )
            for step in progress
        ]
        for span, row in zip(plan.spans, of_spans, strict=True):
            if INVALID_TOKEN in row and (sequence := self.scheduler.finish(span.sequence_id, "error")) is not None:
                reason = self.constraints.failure(span.sequence_id)
                reason = reason or "the model's logits are not finite, or no token is allowed"
                self._news.append(News(sequence, [], error=reason))

    def _take_scores(self, plan: StepPlan, given: StepTokens) -> dict[int, list[TokenScore]]:
        """Keep the scores of prompts until they can be told; return those of new tokens, by sequence id."""
        of_sequence: dict[int, list[TokenScore]] = {}
        first = 0
        for span in plan.spans:
            rows = range(first, first + span.num_logit_rows)
            first += span.num_logit_rows
            scores = [given.scores[row] for row in rows if row in given.scores]
            if not scores:
                continue
            num_of_prompt = len(span.scored_ids)
            if len(scores) > num_of_prompt:
                of_sequence[span.sequence_id] = scores[num_of_prompt:]
            if num_of_prompt:
                sequence = self.scheduler.running(span.sequence_id)
                so_far = self._requests[sequence.request.request_id].prompt_scores
                so_far[sequence.num_scored_tokens - 1 :] = scores[:num_of_prompt]  # again, if the step is run again
        return of_sequence

    def _output_of(self, sequence_id: int) -> list[int]:
        sequence = self.scheduler.running(sequence_id)
        return sequence.token_ids[sequence.num_prompt_tokens :]

    def _expire(self, request_id: str, now: float) -> None:
        """Abort a request whose deadline has passed (its id may be somebody else's by now)."""
        live = self._requests.get(request_id)
        if live is not None and live.accepted.deadline is not None and live.accepted.deadline <= now:
            aborted = self.scheduler.abort(request_id)
            self._news += [News(sequence, [], error="the request's deadline has passed") for sequence in aborted]

    def _learn(self, plan: StepPlan, seconds: float) -> None:
        """Bound the prefill of coming steps by how long this one took, unless its bound was given."""
        assert self.prefill_limit is not None
        num_decodes = sum(span.length == 1 for span in plan.spans)
        self.prefill_limit.see(num_decodes, plan.num_tokens - num_decodes, seconds)
        if self.config.max_prefill_tokens_per_step is None:
            self.scheduler.max_prefill_tokens_per_step = self.prefill_limit.num_tokens

    def _welcome(self, plan: StepPlan, now: float) -> None:
        """Set up what is kept by slot for those who have just come in."""
        for span in plan.spans:
            if self._slot_owners[span.slot] == span.sequence_id:
                continue
            sequence = self.scheduler.running(span.sequence_id)
            live = self._requests[sequence.request.request_id]
            self.runner.assign(
                span.slot,
                live.accepted.params,
                seed=live.accepted.seed,
                index=sequence.index,
                token_ids=sequence.token_ids,
                prompt_len=sequence.num_prompt_tokens,
                stop_token_ids=sequence.request.stop_token_ids,
                bad_words=live.accepted.bad_words,
            )
            if live.accepted.grammar is not None:
                self.constraints.add(sequence.sequence_id, live.accepted.grammar)
            if live.first_scheduled_times[sequence.index] is None:
                live.first_scheduled_times[sequence.index] = now
            self._slot_owners[span.slot] = span.sequence_id

    def _stop_text(self, accepted: AcceptedRequest) -> OutputText | None:
        if self.tokenizer is None or not accepted.params.stop_strings:
            return None
        return OutputText.of_request(self.tokenizer, accepted.request.prompt_token_ids, accepted.params)

    def _report(self, news: News) -> SequenceOutput:
        """The message about a sequence's new tokens, cut at a stop string if one has come, which ends it."""
        sequence, new_token_ids, scores = news.sequence, news.new_token_ids, news.scores
        live = self._requests[sequence.request.request_id]
        text, stop_reason, error = live.stop_texts[sequence.index], None, news.error
        if text is not None and new_token_ids:
            num_before = text.num_tokens_until_stop
            try:
                text.take_in(new_token_ids, sequence.finish_reason)
            except Exception as failure:  # the tokenizer's fault; nobody else's request
                logger.exception("looking for stop strings failed")
                error = repr(failure)
                self.scheduler.finish(sequence.sequence_id, "error")
                sequence.finish_reason = "error"
            stop_reason = text.stop_reason
            if stop_reason is not None:
                num_kept = text.num_tokens_until_stop
                self.scheduler.finish(sequence.sequence_id, "stop", num_kept)
                sequence.finish_reason = "stop"
                new_token_ids = new_token_ids[: num_kept - num_before]
                scores = scores[: len(new_token_ids)]
        if sequence.finish_reason is not None:
            self.constraints.remove(sequence.sequence_id)
            if not self._has_more(sequence):
                del self._requests[sequence.request.request_id]
        output = self._output(sequence, new_token_ids, live, stop_reason, error)
        if not scores and not live.prompt_scores:
            return output
        prompt_scores: list[TokenScore] | None = None
        if sequence.index == 0 and len(live.prompt_scores) == sequence.num_prompt_tokens - 1:  # else it ended before
            prompt_scores, live.prompt_scores = live.prompt_scores, []
        return replace(output, scores=list(scores) or None, prompt_scores=prompt_scores or None)

    def _has_more(self, sequence: Sequence) -> bool:
        """Whether more is to be said of a request than the end of this one of its sequences."""
        request_id = sequence.request.request_id
        unheard = any(n.sequence is not sequence and n.sequence.request.request_id == request_id for n in self._news)
        return unheard or self.scheduler.is_unfinished(request_id)

    @staticmethod
    def _output(
        sequence: Sequence,
        new_token_ids: list[int],
        live: LiveRequest,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> SequenceOutput:
        if sequence.finish_reason == "stop" and stop_reason is None:
            last = sequence.token_ids[-1]
            stop_reason = last if last in (live.accepted.params.stop_token_ids or ()) else None
        return SequenceOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            new_token_ids=new_token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=stop_reason,
            error=error,
            first_scheduled_time=live.first_scheduled_times[sequence.index],
            num_preemptions=sequence.num_preemptions,
            num_cached_tokens=sequence.num_cached_tokens,
        )

    # ------------------------------------------------------------------------------------- seeing it

    def stats(self) -> EngineStats:
        """What the engine has done since it was made, and what it holds now."""
        scheduler, pool = self.scheduler, self.scheduler.block_pool
        return EngineStats(
            num_requests=self._num_requests,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_blocks_used=pool.num_used,
            num_blocks_cached=pool.num_cached,
            num_blocks_free=pool.num_free,
        )

    @staticmethod
    def _arrival_record(request: Request) -> ArrivalRecord:
        return ArrivalRecord(
            request.request_id,
            time.monotonic(),
            request.prompt_token_ids,
            request.num_sequences,
            request.priority,
            request.cache_salt,
        )
