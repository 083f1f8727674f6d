"""Rung 4, the engine: rung 3 with a paged cache, chunked prefill and preemption, reported in the same account."""

from collections import deque
from collections.abc import Sequence
from typing import Unpack

from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.record import StepRecord
from inflight.engine.engine import Engine
from inflight.lessons.run import LessonRequest, Options, Run


def run(engine: Engine, requests: Sequence[LessonRequest], **options: Unpack[Options]) -> Run:
    """Generate greedily for all requests; the engine's own `max_num_seqs` is the number of slots."""
    account = Run(requests, **options)
    slots: dict[int, int] = {}

    def observe(record: StepRecord) -> None:
        spans = {}
        for span in record.spans:
            request = int(span.request_id)
            if request not in slots:
                account.admit(request, span.slot)
            slots[request] = span.slot
            spans[span.slot] = (request, span.length, span.start + span.length)
        account.ragged(spans)

    def submit(number: int) -> None:
        params = SamplingParams(
            temperature=0,
            max_tokens=requests[number].max_new_tokens,
            ignore_eos=True,
            stop_token_ids=list(account.eos_token_ids),
        )
        engine.submit(engine.inputs.accept(str(number), requests[number].prompt_token_ids, params))

    before, engine.observer = engine.observer, observe
    queue = deque(range(len(requests)))
    try:
        while queue or engine.has_unfinished_requests:
            for number in account.take_arrived(queue, len(queue)):
                submit(number)
            if not engine.has_unfinished_requests:
                account.wait()
                continue
            for output in engine.step():
                for token in output.new_token_ids:
                    account.add(int(output.request_id), token)
                if output.finish_reason is not None:
                    account.log_end(int(output.request_id), slots[int(output.request_id)])
    finally:
        engine.observer = before
    return account
