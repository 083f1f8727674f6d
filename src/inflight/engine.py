"""`Engine`: submit, abort, step. The loop, and the only door between scheduling and execution.

One step: the scheduler plans it, the runner runs it and samples tokens, the scheduler takes them in. Data goes one way,
with two edges back that only the engine has: a stop string found in the text ends its sequence before another step is
run, and an abort. Knows requests in tokens; turning prompts into tokens and tokens into text is its callers' work.
"""

import logging
import random
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from inflight.config import EngineConfig
from inflight.errors import InvalidRequestError
from inflight.execution.model import ModelSource
from inflight.execution.model_runner import ModelRunner
from inflight.execution.sampler import INVALID_TOKEN
from inflight.model_info import ModelInfo
from inflight.outputs import SequenceOutput
from inflight.params import SamplingParams
from inflight.plan import StepPlan
from inflight.record import SpanKind, SpanRecord, StepRecord
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.door import make_request
from inflight.scheduling.scheduler import Progress, Scheduler
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


@dataclass(slots=True)
class SequenceState:
    """What the engine keeps of a sequence from its first step to its end."""

    params: SamplingParams
    first_scheduled_time: float
    stop_text: OutputText | None
    """Its text so far, if stop strings have to be looked for."""


class Engine:
    """Runs requests on one model, step by step. Not thread-safe: one caller at a time.

    Args:
        model: hub id, folder, or a loaded model.
        config: how to load it and how to batch.
        tokenizer: to look for stop strings with; without it, requests that have some are refused.

    Raises:
        ModelError: the model can not be loaded, or can not be run exactly.
    """

    def __init__(self, model: ModelSource, config: EngineConfig, tokenizer: Tokenizer | None = None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.runner = ModelRunner(model, config)
        pool = BlockPool(self.model_info.num_blocks, config.block_size)
        self.scheduler = Scheduler(
            pool, config.max_num_seqs, config.max_num_batched_tokens, self.model_info.recompute_beyond
        )
        self.observer: Callable[[StepRecord], None] | None = None
        """Called after each step with its record; while it is None no record is made."""
        self._requests: dict[str, AcceptedRequest] = {}
        self._states: dict[int, SequenceState] = {}
        self._slot_owners = [-1] * config.max_num_seqs
        self._num_steps = 0
        self._num_accepted = 0

    @property
    def model_info(self) -> ModelInfo:
        """What was found out about the model."""
        return self.runner.info

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether another step would do something."""
        return bool(self._requests)

    # ------------------------------------------------------------------------------------- requests

    def accept(self, request_id: str, prompt_token_ids: SequenceOf[int], params: SamplingParams) -> AcceptedRequest:
        """Check a request and resolve it against the model; nothing is queued. Raises `InvalidRequestError`."""
        if request_id in self._requests:
            raise InvalidRequestError(f"request_id {request_id!r} is in use by an unfinished request")
        if params.stop_strings and self.tokenizer is None:
            raise InvalidRequestError(f"stop is {params.stop!r}, but this model has no tokenizer to find text with")
        request = make_request(request_id, prompt_token_ids, params, self.model_info)
        self._num_accepted += 1
        seed = params.seed
        if seed is None:
            seed = random.Random(f"{self.config.seed} {self._num_accepted}").getrandbits(63)
        return AcceptedRequest(request, params, seed)

    def submit(self, accepted: AcceptedRequest) -> None:
        """Queue a request that has passed the door."""
        self._requests[accepted.request.request_id] = accepted
        self.scheduler.submit(accepted.request)

    def abort(self, request_id: str) -> list[SequenceOutput]:
        """End a request's unfinished sequences; nothing happens if there are none."""
        return [self._output(sequence, []) for sequence in self.scheduler.abort(request_id)]

    # ------------------------------------------------------------------------------------- the loop

    def step(self) -> list[SequenceOutput]:
        """Run one step; returns what every sequence with new tokens, or an end, got from it.

        An error in the forward pass ends the sequences of its step with "error", a row of logits that is not finite
        only its own sequence; the engine goes on. An interrupt leaves everything as it was before the step.
        """
        start_time = time.monotonic()
        try:
            plan = self.scheduler.plan()
            if plan is None:
                return []
            self._welcome(plan, start_time)
            spans = self._span_records(plan) if self.observer else ()
            outputs = self._run(plan)
        except BaseException:
            self.scheduler.discard()
            raise
        if self.observer:
            self.observer(self._record(spans, start_time))
        self._num_steps += 1
        return outputs

    def _run(self, plan: StepPlan) -> list[SequenceOutput]:
        try:
            tokens = self.runner.run(plan)
        except Exception as error:
            logger.exception("a step of %d tokens failed", plan.num_tokens)
            return [self._output(sequence, [], repr(error)) for sequence in self.scheduler.fail(plan)]
        rows = iter(tokens)
        sampled = [[next(rows) for _ in range(span.num_logit_rows)] for span in plan.spans]
        invalid = [span for span, row in zip(plan.spans, sampled, strict=True) if INVALID_TOKEN in row]
        progress = self.scheduler.commit(plan, [[] if INVALID_TOKEN in row else row for row in sampled])
        outputs = [self._take_in(step) for step in progress]
        failed = [self.scheduler.finish(span.sequence_id, "error") for span in invalid]
        return outputs + [self._output(s, [], "the model's logits are not finite") for s in failed if s is not None]

    def _welcome(self, plan: StepPlan, now: float) -> None:
        """Set up what is kept by slot, and by sequence, for those who have just come in."""
        for span in plan.spans:
            if self._slot_owners[span.slot] == span.sequence_id:
                continue
            self._slot_owners[span.slot] = span.sequence_id
            sequence = self.scheduler.running(span.sequence_id)
            accepted = self._requests[sequence.request.request_id]
            self.runner.sampler.assign(
                span.slot,
                accepted.params,
                seed=accepted.seed,
                index=sequence.index,
                prompt_len=len(accepted.request.prompt_token_ids),
                stop_token_ids=accepted.request.stop_token_ids,
            )
            if span.sequence_id not in self._states:
                self._states[span.sequence_id] = SequenceState(accepted.params, now, self._stop_text(accepted))

    def _stop_text(self, accepted: AcceptedRequest) -> OutputText | None:
        if self.tokenizer is None or not accepted.params.stop_strings:
            return None
        return OutputText.of_request(self.tokenizer, accepted.request.prompt_token_ids, accepted.params)

    def _take_in(self, progress: Progress) -> SequenceOutput:
        """Look for stop strings in a sequence's new tokens, and end it if one has come."""
        sequence, new_token_ids = progress.sequence, progress.new_token_ids
        text = self._states[sequence.sequence_id].stop_text
        if text is None:
            return self._output(sequence, new_token_ids)
        num_before = text.num_tokens_until_stop
        text.take_in(new_token_ids, sequence.finish_reason)
        if text.stop_reason is None:
            return self._output(sequence, new_token_ids)
        num_kept = text.num_tokens_until_stop
        self.scheduler.finish(sequence.sequence_id, "stop", num_kept)
        sequence.finish_reason = "stop"
        return self._output(sequence, new_token_ids[: num_kept - num_before], stop_reason=text.stop_reason)

    def _output(
        self,
        sequence: Sequence,
        new_token_ids: list[int],
        error: str | None = None,
        stop_reason: int | str | None = None,
    ) -> SequenceOutput:
        """The message about a sequence; one that has ended is forgotten."""
        request_id = sequence.request.request_id
        state = self._states.get(sequence.sequence_id)  # None: it never ran
        if state and sequence.finish_reason == "stop" and stop_reason is None:
            last = sequence.token_ids[-1]
            stop_reason = last if last in (state.params.stop_token_ids or ()) else None
        if sequence.finish_reason is not None:
            self._states.pop(sequence.sequence_id, None)
            if not self.scheduler.is_unfinished(request_id):
                self._requests.pop(request_id, None)
        return SequenceOutput(
            request_id=request_id,
            index=sequence.index,
            new_token_ids=new_token_ids,
            finish_reason=sequence.finish_reason,
            stop_reason=stop_reason,
            error=error,
            first_scheduled_time=state.first_scheduled_time if state else None,
            num_preemptions=sequence.num_preemptions,
        )

    # ------------------------------------------------------------------------------------- seeing it

    def _span_records(self, plan: StepPlan) -> tuple[SpanRecord, ...]:
        records = []
        for span in plan.spans:
            sequence = self.scheduler.running(span.sequence_id)
            is_decode = span.length == 1 and span.start >= len(sequence.request.prompt_token_ids)
            kind: SpanKind = "chunk" if span.num_logit_rows == 0 else "decode" if is_decode else "prefill"
            request_id, index = sequence.request.request_id, sequence.index
            records.append(SpanRecord(span.slot, request_id, index, span.start, span.length, kind))
        return tuple(records)

    def _record(self, spans: tuple[SpanRecord, ...], start_time: float) -> StepRecord:
        pool = self.scheduler.block_pool
        return StepRecord(
            step=self._num_steps,
            start_time=start_time,
            duration=time.monotonic() - start_time,
            spans=spans,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_preemptions=self.scheduler.num_preemptions,
            num_blocks_used=pool.num_blocks - pool.num_free,
            num_blocks=pool.num_blocks,
        )
