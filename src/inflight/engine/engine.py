"""`Engine`: submit, abort, step. The step loop, and the only connection between scheduling and execution.

One step: the scheduler plans it, the runner runs it and samples tokens, the scheduler commits them, the reporter
publishes the results. Only this class feeds results back to scheduling:

- a sequence ends early: by an abort, its deadline, a stop string, or because no token could be sampled;
- a step fails (its sequences end with "error") or its forward pass is interrupted (it is planned again);
- step times bound the prefill of later steps, and the time for images between them (`PrefillLimit`), and give the cost
  of draft tokens (`Speculation`).

Requests are token ids here; callers tokenize and detokenize.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from inflight.contracts.api.config import BACKGROUND, EngineConfig
from inflight.contracts.api.errors import (
    InvalidRequestError,
    QueueFullError,
    RankLostError,
)
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.outputs import SequenceOutput
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.plan import StepPlan, StepTokens
from inflight.contracts.step.record import ArrivalRecord, EngineStats, StepRecord
from inflight.engine.admission import AcceptedRequest, check_whole, leave_to_generate
from inflight.engine.input_processor import InputProcessor, each_adapter
from inflight.engine.prefix_storing import open_prefix_store, pin_prefix
from inflight.engine.ranks.runner import LeadingRunner, make_runner
from inflight.engine.reporting import Deadlines, Reporter, SequenceUpdate
from inflight.engine.speculating import check_draft, describe_speculation, load_draft, speculation_of
from inflight.engine.step_feedback import StepFeedback, Totals
from inflight.engine.step_watch import StepWatch
from inflight.execution.adapters import AdapterCheckpoint
from inflight.execution.hf.load import ModelSource, WatchedWeights, default_sampling_params, writes_to_its_weights
from inflight.execution.multimodal import EncodingError
from inflight.execution.pooling.checkpoint import pooling_plan
from inflight.scheduling.scheduler import Scheduler
from inflight.text.tokenizer import CONFIGURATION, Tokenizer

if TYPE_CHECKING:
    from inflight.speculation import Speculation

logger = logging.getLogger(__name__)

LONGEST_REST = 0.5
"""Seconds between steps while requests wait for kept blocks: deadlines are looked at in between."""

LONGEST_WAIT = 0.05
"""Seconds that a step with nothing to compute waits for blocks being loaded."""


class Engine:
    """Runs requests on one model, step by step. Not thread-safe: one caller at a time.

    Args:
        model: hub id, folder, or a loaded model.
        config: options of loading and batching.
        tokenizer: finds stop strings; without one, requests that have some are refused.

    Attributes:
        observer: called with each step's record; None: no records are made.
        inputs: accepts and compiles requests.
        feedback: learns from the steps.

    Raises:
        ModelError: the model cannot be loaded, or cannot be run exactly.
    """

    def __init__(self, model: ModelSource, config: EngineConfig, tokenizer: Tokenizer | None = None) -> None:
        pooling = pooling_plan(model, config, tokenizer and tokenizer.inner)
        if pooling is not None:  # nothing is kept by slot of a text, so that a slot costs nothing
            config = config.replace(max_num_seqs=config.scheduling.max_num_batched_tokens)
        self.config = config
        check_draft(config)
        each_adapter(config, AdapterCheckpoint.read)  # wrong adapters are refused before anything slow
        self.runner = make_runner(model, config, pooling)
        is_callers = isinstance(model, PreTrainedModel) and not writes_to_its_weights(model)
        watched = WatchedWeights(model) if is_callers else None
        self.model_info = info = self._describe(tokenizer)
        self.inputs = InputProcessor(config, info, tokenizer, self.runner.adapters, watched)
        each_adapter(config, lambda source: self.inputs.adapters.get(source))
        self._speculation: Speculation | None = None
        if not info.speculation.startswith("off"):
            proposer = load_draft(config, self.runner, tokenizer)
            self._speculation = speculation_of(config, lambda: self.inputs.grammars, proposer)
        self._store = open_prefix_store(config, self.runner)
        if self._store is not None:
            weakref.finalize(self, self._store.end).atexit = False  # at process exit the store itself waits
        self.scheduler = Scheduler.from_config(
            config,
            info.num_blocks,
            info,
            layout=self.runner.cache_layout,
            speculator=self._speculation,
            block_store=self._store,
            clock=time.monotonic,
        )
        if self.runner.encoder_outputs is not None:
            self.scheduler.has_item = self.runner.encoder_outputs.has
            self.runner.encoder_outputs.store = self._store
        self._reporter = Reporter(self.scheduler, tokenizer)
        self._deadlines = Deadlines()
        self._watch = StepWatch(self.scheduler)
        self._observer: Callable[[StepRecord], None] | None = None
        self.feedback = StepFeedback(self.scheduler, self._speculation, self._store)
        self._totals = Totals()
        self._asked_to_abort: deque[str] = deque()
        self._is_stepping = False

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another step would do anything, now or later."""
        return len(self._reporter) > 0

    @property
    def idle_seconds(self) -> float | None:
        """For how long no step is needed, unless requests come; None: for ever."""
        return min(self.scheduler.idle_seconds, LONGEST_REST) if self.has_unfinished_requests else None

    @property
    def observer(self) -> Callable[[StepRecord], None] | None:
        return self._observer

    @observer.setter
    def observer(self, observer: Callable[[StepRecord], None] | None) -> None:
        if self._observer is None:
            self._watch.start_over()  # it missed earlier steps
        self._observer = observer

    def _describe(self, tokenizer: Tokenizer | None) -> ModelInfo:
        """Facts about the model and its tokenizer."""
        if self.runner.info.pooling is not None:
            return replace(self.runner.info, speculation="off")
        info = replace(self.runner.info, speculation=describe_speculation(self.config, self.runner.info))
        if info.speculation.startswith("off:") and (
            self.config.speculation.draft_model or self.config.speculation.method != "auto"
        ):
            logger.warning("speculation is %s", info.speculation)
        ends, notes = dict.fromkeys(info.eos_token_ids, CONFIGURATION), info.notes
        if tokenizer is not None:
            named, notes = tokenizer.ends(info.eos_token_ids), notes + tokenizer.notes
            ends = {token_id: names for token_id, names in named.items() if token_id < info.vocab_size}
            for note in tokenizer.notes:
                logger.warning("%s", note)
        return replace(info, eos_token_ids=tuple(ends), eos_named_by=tuple(ends.values()), notes=notes)

    def default_sampling_params(self) -> SamplingParams:
        """Defaults from the model's `generation_config`, else `SamplingParams()`."""
        return default_sampling_params(self.runner.generation_config)

    # ------------------------------------------------------------------------------------- requests

    def check_room(self, accepted: AcceptedRequest) -> None:
        """Raise `QueueFullError` if too many sequences wait already. Those in the background do not count."""
        limit = self.config.scheduling.max_num_waiting
        if limit is None or accepted.request.priority == BACKGROUND:
            return
        num_waiting = self.scheduler.num_waiting - self.scheduler.sequences.waiting.num_in_background
        if num_waiting + accepted.params.n > limit:
            raise QueueFullError(f"{num_waiting} sequences wait already, and at most {limit} may; try again later")

    def submit(self, accepted: AcceptedRequest) -> None:
        """Queue an accepted request.

        Raises:
            QueueFullError: too many sequences wait.
            InvalidRequestError: its id is in use, or the model cannot take its images.
        """
        self.check_room(accepted)
        accepted = self.inputs.compile(accepted)
        request = accepted.request
        if request.request_id in self._reporter:
            raise InvalidRequestError(f"request_id {request.request_id!r} is in use by an unfinished request")
        if (inputs := request.multimodal) is not None:
            inputs = self.runner.check_images(request.prompt_token_ids, inputs)
            limits = self.scheduler.limits
            check_whole(inputs, max(1, limits.max_num_batched_tokens - limits.max_num_seqs + 1))
            request = replace(request, multimodal=inputs)
        if self.model_info.executor == "generate" or (inputs is not None and inputs.left_to_generate):
            request = leave_to_generate(request)
        accepted = replace(accepted, request=request)
        self._reporter.follow(accepted)
        self._totals.requests += 1
        self.scheduler.submit(request)
        if self.observer:
            self._watch.observe_arrival(
                ArrivalRecord(
                    request.request_id,
                    time.monotonic(),
                    request.prompt_token_ids,
                    request.num_sequences,
                    request.priority,
                    request.cache_salt,
                    request.adapter,
                )
            )
        if accepted.deadline is not None:
            self._deadlines.add(request.request_id, accepted.deadline)

    def abort(self, request_id: str) -> list[SequenceOutput]:
        """Abort a request and return its last outputs; does nothing if it is unknown. Pending outputs of it are
        dropped. Called within a step (by the observer or a hook of the model), it takes effect in the next one, which
        returns the outputs."""
        if self._is_stepping:
            self._asked_to_abort.append(request_id)
            return []
        outputs = self._abort(request_id)
        self._drop_ended()
        return outputs

    def _abort(self, request_id: str) -> list[SequenceOutput]:
        return self._reporter.forget(request_id, self.scheduler.abort(request_id))

    # ------------------------------------------------------------------------------------- the loop

    def step(self) -> list[SequenceOutput]:
        """Run one step; return the outputs of every sequence that has new tokens or has ended.

        An error in the forward pass ends the step's sequences with "error"; a row of logits that is not finite ends
        only its own sequence. The engine continues. An interrupted forward pass is planned again; after any other
        exception the engine must not be used.

        Raises:
            RankLostError: one of the model's ranks has ended.
        """
        self._is_stepping = True
        try:
            if self.scheduler.wanted_items:
                self._encode()
            self._step()
        finally:
            self._is_stepping = False
        outputs = list(self._reporter.outbox)
        self._reporter.outbox.clear()
        return outputs

    def _step(self) -> None:
        start_time = time.monotonic()
        while self._asked_to_abort:
            ends = self._abort(self._asked_to_abort.popleft())
            self._reporter.outbox.extend(ends)
        for request_id in self._deadlines.due(start_time):
            self._expire(request_id, start_time)
        plan, planned = self.scheduler.plan(), None
        if plan is not None:
            self._observe_assignments(plan, start_time)
            planned = self._watch.observe_plan(plan) if self.observer else None
            self._run(plan)
        self._reporter.report()
        self._totals.generated_tokens += sum(len(each.new_token_ids) for each in self._reporter.outbox)
        self._drop_ended()
        record = None
        if plan is not None:
            self._totals.observe(plan)
            duration = time.monotonic() - start_time
            self.feedback.observe(plan, duration)
            if planned is not None:
                record = self._watch.record(planned, self._totals.steps - 1, start_time, duration)
        if self.observer and record is not None:
            self.observer(record)
        if self._store is not None:
            self._store.is_busy = self.scheduler.num_running > 0
            if plan is None and self.scheduler.persistence.is_waiting:
                self._store.wait(LONGEST_WAIT)

    def _encode(self) -> None:
        """Encode images that the last plan would have had."""
        wanted = {
            digest: each for digest, each in self.scheduler.wanted_items.items() if self.scheduler.has_sequence(each[0])
        }
        try:
            self.runner.encode(wanted, self.feedback.encoding_seconds)
        except EncodingError as error:
            self._end(error)

    def _end(self, error: EncodingError) -> None:
        """End the sequence of an image or sound that cannot be encoded."""
        if (sequence := self.scheduler.finish(error.sequence_id, "error")) is not None:
            self._reporter.add([SequenceUpdate(sequence, [], error=str(error))])

    def _observe_assignments(self, plan: StepPlan, now: float) -> None:
        """Note when sequences took their slots, and start their grammars."""
        for assignment in plan.assignments:
            accepted = self._reporter.observe_assignment(assignment, now)
            if accepted.grammar is not None:
                self.inputs.constraints.add(assignment.sequence_id, accepted.grammar)

    def _run(self, plan: StepPlan) -> None:
        """Run a plan and commit the results."""
        constraints = self.inputs.grammars
        masks = None if constraints is None else constraints.begin(plan, self._output_of)
        given: StepTokens | Exception
        try:
            given = self.runner.run(plan, None if masks is None else masks.result)
        except EncodingError as error:
            self.scheduler.discard()
            self._end(error)
            return
        except BaseException as error:
            if not isinstance(error, Exception) or isinstance(error, RankLostError):
                self.scheduler.discard()
                raise
            logger.exception("a step of %d tokens failed", plan.num_tokens)
            given = error
        if isinstance(given, Exception):
            failed = self.scheduler.fail(plan)
            self._reporter.add(SequenceUpdate(sequence, [], error=repr(given)) for sequence in failed)
            return
        of_sequence = {}
        for span, span_tokens in zip(plan.spans, given, strict=True):
            if span_tokens.prompt_scores:
                self._reporter.observe_prompt_scores(span, span_tokens.prompt_scores)
            of_sequence[span.sequence_id] = span_tokens
        progress = self.scheduler.commit(plan, [span_tokens.token_ids for span_tokens in given])
        errors = {}
        for span, span_tokens in zip(plan.spans, given, strict=True):
            if not span_tokens.is_finite and (sequence := self.scheduler.finish(span.sequence_id, "error")) is not None:
                num_given = len(span_tokens.token_ids)
                reason = None if constraints is None else constraints.failure(span.sequence_id, num_given)
                errors[sequence] = (
                    span_tokens.error or reason or "the model's logits are not finite, or no token is allowed"
                )
        for step in progress:  # a sequence that fails after accepted draft tokens has both tokens and an error
            own, failure = of_sequence[step.sequence.sequence_id], errors.pop(step.sequence, None)
            self._reporter.add([SequenceUpdate(step.sequence, step.new_token_ids, own.scores, failure, own.values)])
        self._reporter.add(SequenceUpdate(sequence, [], error=error) for sequence, error in errors.items())

    def _output_of(self, sequence_id: int) -> list[int]:
        sequence = self.scheduler.running(sequence_id)
        return sequence.token_ids[sequence.num_prompt_tokens :]

    def _drop_ended(self) -> None:
        """Drop the state of finished sequences: grammars and, if no plan follows, state by slot."""
        if self.inputs.grammars is not None:
            self.inputs.grammars.keep_only(self.scheduler.has_sequence)
        if self._speculation is not None:
            self._speculation.keep_only(self.scheduler.has_sequence)
        if not self.has_unfinished_requests and (release := self.scheduler.plan_release()) is not None:
            self.runner.run(release, None)

    def _expire(self, request_id: str, now: float) -> None:
        """Abort a request whose deadline has passed. (Its id may belong to another request by now.)"""
        accepted = self._reporter.accepted(request_id)
        if accepted is not None and accepted.deadline is not None and accepted.deadline <= now:
            aborted = self.scheduler.abort(request_id)
            error = "the request's deadline has passed"
            self._reporter.add([SequenceUpdate(sequence, [], error=error) for sequence in aborted])

    def when_lost(self, call: Callable[[RankLostError], None]) -> None:
        """Set a function to call, in another thread, when a rank has ended and no step can run any more."""
        if isinstance(self.runner, LeadingRunner):
            self.runner.when_lost(call)

    def save_prefixes(self, seconds: float) -> None:
        """Wait until all full blocks are saved in `prefix_cache_dir`, at most this many seconds."""
        if self._store is not None:
            self._store.flush(seconds)

    def pin_prefix(self, token_ids: SequenceOf[int], cache_salt: str | None, adapter_source: str | None = None) -> None:
        """Pin the saved blocks of a prompt in `prefix_cache_dir`. Raises `ValueError` if that is too much."""
        digest = None if adapter_source is None else self.inputs.adapters.get(adapter_source).digest
        if self._store is not None:
            pin_prefix(self._store, self.model_info, token_ids, cache_salt, digest)

    def stats(self) -> EngineStats:
        """What the engine has done since it was made, and what it holds now."""
        return self._totals.stats(self.scheduler)
