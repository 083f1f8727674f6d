"""`Reporter`: makes outputs of results, and ends sequences at stop strings. A sequence's updates wait here until the
end of the step, its outputs until a caller takes them.
"""

import heapq
import logging
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from inflight.contracts.api.outputs import SequenceOutput, TokenScore
from inflight.contracts.api.pooling import Values
from inflight.contracts.step.plan import SlotAssignment, Span
from inflight.engine.admission import AcceptedRequest
from inflight.scheduling.scheduler import Scheduler
from inflight.scheduling.sequence import Sequence
from inflight.text.output_text import OutputText
from inflight.text.tokenizer import Tokenizer


class Deadlines:
    """Requests with a deadline, a time of `time.monotonic()`. A request that has ended before its deadline is still
    reported as due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request_id: str, deadline: float) -> None:
        """Set a request's deadline."""
        heapq.heappush(self._heap, (deadline, request_id))

    def due(self, now: float) -> list[str]:
        """The requests whose deadline has passed, each once."""
        ids = []
        while self._heap and self._heap[0][0] <= now:
            ids.append(heapq.heappop(self._heap)[1])
        return ids


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LiveRequest:
    """State of a request until its last sequence ends; lists are by sequence index.

    Attributes:
        stop_texts: each sequence's text so far, if it has stop strings.
        prompt_scores: the scores of its prompt that have not been reported yet.
    """

    accepted: AcceptedRequest
    first_scheduled_times: list[float | None]
    stop_texts: list[OutputText | None]
    prompt_scores: list[TokenScore] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """A result for a sequence that is not yet reported.

    Attributes:
        scores: of the sampled tokens; the sequence may have taken only the first ones.
        values: the numbers of a pooled text.
    """

    sequence: Sequence
    new_token_ids: list[int]
    scores: SequenceOf[TokenScore] = ()
    error: str | None = None
    values: "Values | None" = None


class Reporter:
    """Follows the requests of one engine.

    Args:
        scheduler: ends the sequences whose text has a stop string.
        tokenizer: detokenizes.

    Attributes:
        outbox: outputs not yet taken, in order.
    """

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._requests: dict[str, LiveRequest] = {}
        self._updates: deque[SequenceUpdate] = deque()
        self.outbox: deque[SequenceOutput] = deque()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        """Requests whose end has not been reported."""
        return len(self._requests)

    def accepted(self, request_id: str) -> AcceptedRequest | None:
        """The tracked request of this id, if any."""
        live = self._requests.get(request_id)
        return None if live is None else live.accepted

    def follow(self, accepted: AcceptedRequest) -> None:
        """Track a request until its last sequence has ended."""
        request, params = accepted.request, accepted.params
        texts: list[OutputText | None] = [None] * params.n
        if params.stop_strings and self._tokenizer is not None:
            texts = [OutputText.of_request(self._tokenizer, request.prompt_token_ids, params) for _ in texts]
        self._requests[request.request_id] = LiveRequest(accepted, [None] * params.n, texts)

    def observe_assignment(self, assignment: SlotAssignment, now: float) -> AcceptedRequest:
        """Note that a sequence takes a slot. Returns its request."""
        sequence = self._scheduler.running(assignment.sequence_id)
        live = self._requests[sequence.request.request_id]
        if live.first_scheduled_times[sequence.index] is None:
            live.first_scheduled_times[sequence.index] = now
        return live.accepted

    def observe_prompt_scores(self, span: Span, scores: SequenceOf[TokenScore]) -> None:
        """Keep the scores of a span's `scored_ids` for reporting; call it before the commit."""
        sequence = self._scheduler.running(span.sequence_id)
        so_far = self._requests[sequence.request.request_id].prompt_scores
        so_far[sequence.num_scored_tokens - 1 :] = scores  # a step that runs again gives them again

    def add(self, update: Iterable[SequenceUpdate]) -> None:
        """Queue updates until `report`."""
        self._updates += update

    def report(self) -> None:
        """Turn all updates into outputs."""
        while self._updates:
            self.outbox.append(self._output_of(self._updates.popleft()))

    def forget(self, request_id: str, aborted: Iterable[Sequence]) -> list[SequenceOutput]:
        """Drop a request and everything not yet reported about it; return the ends of its `aborted` sequences."""
        live = self._requests.pop(request_id, None)
        self._updates = deque(update for update in self._updates if update.sequence.request.request_id != request_id)
        self.outbox = deque(output for output in self.outbox if output.request_id != request_id)
        return [] if live is None else [_output(sequence, [], live) for sequence in aborted]

    def _output_of(self, update: SequenceUpdate) -> SequenceOutput:
        """The output for an update, cut at a stop string, which ends the sequence."""
        sequence, new_token_ids = update.sequence, update.new_token_ids
        live = self._requests[sequence.request.request_id]
        text, stop_reason, error = live.stop_texts[sequence.index], None, update.error
        if text is not None and new_token_ids:
            num_before = text.num_tokens_until_stop
            try:
                text.take_in(new_token_ids, sequence.finish_reason)
            except Exception as failure:  # the tokenizer failed: end this request, and no other
                logger.exception("looking for stop strings failed")
                error = repr(failure)
                self._scheduler.finish(sequence.sequence_id, "error")
                sequence.finish_reason = "error"
            stop_reason = text.stop_reason
            if stop_reason is not None:
                num_kept = text.num_tokens_until_stop
                self._scheduler.finish(sequence.sequence_id, "stop", num_kept)
                sequence.finish_reason, error = "stop", None  # the failure came after the stop string
                new_token_ids = new_token_ids[: num_kept - num_before]
        if sequence.finish_reason is not None and not self._has_more(sequence):
            del self._requests[sequence.request.request_id]
        output = _output(sequence, new_token_ids, live, stop_reason, error, update.values)
        scores = update.scores[: len(new_token_ids)]
        if not scores and not live.prompt_scores:
            return output
        prompt_scores: list[TokenScore] | None = None
        if sequence.index == 0 and len(live.prompt_scores) == sequence.num_prompt_tokens - 1:  # else it ended before
            prompt_scores, live.prompt_scores = live.prompt_scores, []
        return replace(output, scores=list(scores) or None, prompt_scores=prompt_scores or None)

    def _has_more(self, sequence: Sequence) -> bool:
        """Whether a request has more to report than this sequence's end."""
        request_id = sequence.request.request_id
        if sequence.request.num_sequences == 1:
            return False
        unheard = any(n.sequence is not sequence and n.sequence.request.request_id == request_id for n in self._updates)
        return unheard or self._scheduler.is_unfinished(request_id)


def _output(
    sequence: Sequence,
    new_token_ids: list[int],
    live: LiveRequest,
    stop_reason: int | str | None = None,
    error: str | None = None,
    values: "Values | None" = None,
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
        num_draft_tokens=sequence.num_draft_tokens,
        num_accepted_tokens=sequence.num_accepted_tokens,
        values=None if values is None else values.tobytes(),
    )
