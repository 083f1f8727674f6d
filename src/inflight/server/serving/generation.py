"""Runs several prompts, each with several sequences, as one request on the engine.

Merges their streams, notifies the observer, and decides which endings are errors. Of HTTP it knows only that the client
may disconnect.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeAlias

from inflight.contracts.api.config import BACKGROUND
from inflight.contracts.api.errors import InvalidRequestError, QueueFullError
from inflight.contracts.api.outputs import FinishReason, RequestOutput, TextDelta
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.multimodal import MultimodalInputs
from inflight.entrypoints.inputs import ReadPrompt
from inflight.server.serving.observer import EndReason
from inflight.server.serving.service import RunningRequest, Service
from inflight.server.serving.streams import Client
from inflight.server.wire.api_errors import ApiError

Deliver: TypeAlias = Callable[[list[TextDelta]], Awaitable[None]]
"""Receives new deltas. If it is slow, deltas that arrive meanwhile are merged into its next call."""

BYTES_OF_SCORE = 40
"""Approximate bytes of a log-probability in JSON."""

MAX_NUM_HELD = 256
"""Most deltas buffered for a client that does not read; beyond that, its streams wait."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A generation request.

    Attributes:
        request_id: the id of the answer.
        prompts: the token ids of each prompt, within the context.
        params: the same for all prompts.
        adapter: the name of their adapter; None: none.
        multimodal: the images and sounds of each prompt, None: it has none; empty: no prompt has any.
    """

    request_id: str
    prompts: Sequence[list[int]]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    multimodal: Sequence[MultimodalInputs | None] = ()


async def generate(
    service: Service, generation: Generation, client: Client, deliver: Deliver | None = None
) -> list[RequestOutput]:
    """Run `generation` to its end and return the outputs in the order of its prompts.

    Cancelling the task ends the generation, as when the `client` disconnects.

    Args:
        deliver: receives all deltas in order, those of one step together, with `prompt_index`. None: only the outputs
            are needed.

    Raises:
        ApiError: a sequence could not be finished.
        InvalidRequestError, QueueFullError, EngineDeadError: as `AsyncLLM.stream`.
    """
    if len(generation.prompts) == 1 and (generation.params.n == 1 or deliver is None):
        # No queue: the common case.
        return [await _follow(service, generation, client, 0, deliver)]
    queue: asyncio.Queue[TextDelta] = asyncio.Queue(MAX_NUM_HELD)

    async def hold(deltas: list[TextDelta]) -> None:
        await queue.put(deltas[0])

    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for index in range(len(generation.prompts)):
                tasks.append(
                    group.create_task(_follow(service, generation, client, index, None if deliver is None else hold))
                )
                await asyncio.sleep(0)  # yields to other requests between two of these
            if deliver is not None:
                await _deliver_all(queue, len(generation.prompts), deliver)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _deliver_all(queue: "asyncio.Queue[TextDelta]", num_unfinished: int, deliver: Deliver) -> None:
    """Deliver deltas as they arrive, until all prompts are finished."""
    while num_unfinished:
        deltas = [await queue.get()]
        while not queue.empty():
            deltas.append(queue.get_nowait())
        num_unfinished -= sum(delta.output is not None for delta in deltas)
        await deliver(deltas)


async def _follow(
    service: Service, generation: Generation, client: Client, prompt_index: int, deliver: Deliver | None
) -> RequestOutput:
    """Run one prompt to its end."""
    request_id = generation.request_id if len(generation.prompts) == 1 else f"{generation.request_id}-{prompt_index}"
    observer = service.observer
    output: RequestOutput | None = None
    reason: EndReason = "error"
    params, priority = generation.params, generation.priority
    prompt = generation.prompts[prompt_index]
    multimodal = generation.multimodal[prompt_index] if generation.multimodal else None
    texts: list[list[str]] | None = [[] for _ in range(params.n)] if service.keeps_texts else None
    observer.started(request_id, generation.params.n, generation.params, generation.adapter)
    running = RunningRequest(prompt, params, priority, texts)
    service.begin(request_id, running)
    try:
        if service.in_background:
            priority = BACKGROUND
            params = params if params.seed is not None else replace(params, seed=secrets.randbits(63))
        stream = service.llm.stream(
            prompt if multimodal is None else ReadPrompt(None, prompt, None, multimodal),
            params,
            request_id,
            priority=priority,
            cache_salt=generation.cache_salt,
            adapter=generation.adapter,
        )
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                if delta.token_ids:
                    now = time.monotonic()
                    running.add(delta, now)
                    observer.produced(request_id, len(delta.token_ids), now)
                if delta.output is not None:
                    output = delta.output
                    reason = output.outputs[0].finish_reason or "error"
                _refuse_bad_end(delta.finish_reason, output)
                if deliver is not None:
                    await deliver([replace(delta, prompt_index=prompt_index) if prompt_index else delta])
    except (InvalidRequestError, QueueFullError):
        reason = "refused"
        raise
    except asyncio.CancelledError:
        reason = "timeout" if client.is_too_late else "abort"
        raise
    finally:
        del service.running[request_id]
        observer.finished(request_id, output, reason)
    assert output is not None
    return output


def _refuse_bad_end(reason: FinishReason | None, output: RequestOutput | None) -> None:
    """Raise `ApiError` if a sequence ended in an error or was aborted."""
    if reason == "error":
        message = (output and output.error) or "a sequence failed"
        raise ApiError(500, f"the model could not be run on this request: {message}", code="generation_failed")
    if reason == "abort":
        raise ApiError(503, (output and output.error) or "the request was aborted", code="aborted")


def size_of_answer(outputs: Sequence[RequestOutput]) -> int:
    """Estimate the bytes to process for an answer of these outputs."""
    size = 0
    for output in outputs:
        positions = [output.prompt_logprobs, *(each.logprobs for each in output.outputs)]
        size += BYTES_OF_SCORE * sum(len(each) * len(each[-1] or ()) for each in positions if each)
        size += sum(len(each.text) for each in output.outputs)
    return size
