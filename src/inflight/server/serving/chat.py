"""`answer_chat`: answers chats, for the chat-like endpoints of all APIs.

An endpoint provides a request model (`ChatBody`) and a `ChatAnswer`, which formats the answer, whole and as a stream.
Everything in between is here, independent of APIs.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request
from starlette.responses import Response

from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.outputs import RequestOutput, TextDelta
from inflight.server.chat_format.answer_form import answer_form
from inflight.server.chat_format.blocks import Blocks
from inflight.server.serving.generation import Generation, generate, size_of_answer
from inflight.server.serving.next_question import expect_question
from inflight.server.serving.request_fields import ChatBody
from inflight.server.serving.service import RenderedChat, Service, service_of
from inflight.server.serving.streams import Client, EventStream, Write, attended
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.off_loop import off_loop

B = TypeVar("B", bound=ChatBody)


class Events(ABC):
    """Turns one answer into events."""

    @abstractmethod
    def write(self, deltas: list[TextDelta]) -> bytes:
        """Return the events for these deltas; empty if nothing can be shown yet."""

    @abstractmethod
    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the last events."""

    def failed(self, error: ApiError) -> bytes | None:
        """Return the last event of a failed answer; None: the endpoint's envelope."""
        return None


class ChatAnswer(ABC, Generic[B]):
    """One answer to a chat. Its constructor prepares the request, which is slow for a long one.

    Args:
        info: of the model.

    Attributes:
        ID: the prefix of answers' ids.
        PARAM: the request field that holds the chat, for error messages.
        generation: what to run.
        form: how to read reasoning and tool calls; None: the text is plain content.
        model_name: the model's name in the answer.
        created_at: seconds of Unix time.

    Raises:
        ApiError: the request cannot be run.
    """

    ID: ClassVar[str]
    PARAM: ClassVar[str] = "messages"

    def __init__(self, body: B, service: Service, info: ModelInfo) -> None:
        body.check(service.settings)
        self.body, self.tokenizer = body, service.llm.tokenizer
        self._rendered = self.written(service, info)
        self.form = answer_form(
            body.tool_fields,
            body.structured_output,
            service.tokenizer,
            self._rendered.text,
            self._rendered.chat.get("chat_template"),
            service.settings.tool_call_parser,
            body.reasoning_options,
        )
        options = {} if self.form is None else self.form.sampling_options
        params = body.sampling_params(service.llm.get_default_sampling_params(), info.vocab_size, **options)
        service.check_num_sequences(1, params.n, "n")
        items, limit = self._rendered.multimodal, body.most_prompt_tokens
        if items is not None and limit is not None:
            raise ApiError(400, "truncate_prompt_tokens would cut images or sounds", param="truncate_prompt_tokens")
        prompt = service.fitted(self._rendered.token_ids, info, self.PARAM, limit)
        service.check_num_scores([prompt], params)
        adapter, request_id = service.adapter_of(body.model), f"{self.ID}{uuid.uuid4().hex}"
        self.generation = Generation(
            request_id, [prompt], params, body.priority or 0, body.cache_salt, adapter, [items]
        )
        self.model_name, self.created_at = service.name_of(adapter), int(time.time())

    def written(self, service: Service, info: ModelInfo) -> RenderedChat:
        """Return the rendered chat."""
        return service.written(self.body.for_template(service.settings), info, self.PARAM, self.body.reasoning_options)

    def new_blocks(self) -> Blocks:
        """Return a reader for one sequence's text."""
        return Blocks() if self.form is None else self.form.make_reader()

    def num_reasoning_tokens(self, *answers: Blocks) -> int | None:
        """The number of reasoning tokens of these sequences, counted by encoding the text again; None: the model does
        not reason."""
        if self.form is None or self.tokenizer is None:
            return None
        return sum(blocks.num_reasoning_tokens(self.tokenizer) for blocks in answers)

    @abstractmethod
    def whole(self, output: RequestOutput) -> bytes:
        """Return the answer in JSON."""

    @abstractmethod
    def events(self) -> Events:
        """Return the writer of the answer's events."""

    def keep(self) -> None:
        """Called in the event loop once the whole answer is written."""

    def expect_next(self, service: Service, output: RequestOutput) -> None:
        """Compute what the next question will begin with, if that is not cached. Called in the event loop at the
        answer's end."""
        if self.form is not None and self.generation.params.n == 1:  # plain texts are not changed
            expect_question(service, self._rendered, self.generation, output, self.new_blocks())


A = TypeVar("A", bound=ChatAnswer[Any])


async def answer_chat(
    body: B, request: Request, make: Callable[[B, Service, ModelInfo], ChatAnswer[B]], more_bytes: int = 0
) -> Response:
    """Answer a chat, whole or as a stream.

    Args:
        more_bytes: estimated bytes to process besides the body.
    """
    service = service_of(request)
    async with attended(request.receive, service.settings.request_timeout) as client:
        answer = await prepared(body, request, make, more_bytes)
        if not body.stream:
            outputs = await generate(service, answer.generation, client)
            whole = await off_loop(more_bytes + size_of_answer(outputs), lambda: answer.whole(*outputs))
            answer.keep()
            answer.expect_next(service, outputs[0])
            return Response(whole, media_type="application/json")
    return stream(service, answer.generation, answer.events(), partial(answer.expect_next, service))


async def prepared(body: B, request: Request, make: Callable[[B, Service, ModelInfo], A], more_bytes: int = 0) -> A:
    """Return the answer, which does not run yet. Raises `ApiError`."""
    service = service_of(request)
    service.adapter_of(body.model)
    info = await service.generating_info()
    size = len(await request.body()) + more_bytes + await service.fetch_items(info)
    return await off_loop(size, lambda: make(body, service, info))


def stream(
    service: Service,
    generation: Generation,
    events: Events,
    then: Callable[[RequestOutput], None] = lambda _: None,
) -> EventStream:
    """Return a response that runs `generation` and streams its events, one write per step.

    Args:
        then: called with the first prompt's output when all is written.
    """

    async def run(client: Client, write: Write) -> None:
        async def deliver(deltas: list[TextDelta]) -> None:
            if chunk := events.write(deltas):
                await write(chunk)

        outputs = await generate(service, generation, client, deliver)
        await write(events.end(outputs))
        then(outputs[0])

    return EventStream(run, service.settings, events.failed)
