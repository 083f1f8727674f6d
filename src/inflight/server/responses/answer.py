"""`ResponseAnswer`: a response: its conversation, response object and events, while running, finished or failed."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.outputs import CompletionOutput, RequestOutput, TextDelta
from inflight.server.chat_format.blocks import Block, BlockDelta, Blocks, CallBlock, ReasoningBlock, TextBlock
from inflight.server.chat_format.tools import call_for_template, with_calls_joined, with_names
from inflight.server.openai import logprobs
from inflight.server.responses.request import ENCODED, Chat, ResponsesRequest, encoded_reasoning, items_of, stored_items
from inflight.server.responses.store import ResponseStore, StoredResponse
from inflight.server.serving.chat import ChatAnswer, Events
from inflight.server.serving.service import RenderedChat, Service
from inflight.server.wire.api_errors import ApiError, ErrorEnvelope
from inflight.server.wire.json_route import to_json
from inflight.text.output_text import OutputText

SHARE_FOR_OUTPUT = 4
"""Truncation of a long conversation leaves 1/`SHARE_FOR_OUTPUT` of the context free."""


class AnswerReader:
    """Divides an answer into blocks, and gives each text the log-probabilities of its tokens.

    A token belongs to the text that grows when the token's own text becomes certain. With log-probabilities it reads
    token by token, so the result does not depend on how a stream's deltas group tokens.

    Attributes:
        blocks: what was read so far.
        logprobs_of: the log-probabilities of each text, by the number of its block.
    """

    def __init__(self, answer: "ResponseAnswer") -> None:
        self._answer, self.blocks = answer, answer.new_blocks()
        self.logprobs_of: dict[int, list[dict[str, Any]]] = {}
        self._text: OutputText | None = None
        if answer.body.num_logprobs is not None and answer.tokenizer is not None:
            (prompt,) = answer.generation.prompts
            self._text = OutputText.of_request(answer.tokenizer, prompt, answer.generation.params)
        self._pending: list[dict[str, Any]] = []  # of tokens whose text is pending, or not part of a text
        self._is_behind_other = False  # whether reasoning or a call has grown since the last text

    def feed(self, delta: CompletionOutput | TextDelta) -> list[tuple[BlockDelta, list[dict[str, Any]]]]:
        """Return what grew, with the log-probabilities of the added tokens; tokens of reasoning and calls have none."""
        is_over = delta.finish_reason is not None
        if self._text is None:
            return [(growth, []) for growth in self.blocks.feed(delta.text, is_last=is_over)]
        new = logprobs.of_chat(
            delta.token_ids, delta.logprobs or [], self._answer.body.num_logprobs or 0, self._answer.tokenizer
        )
        grown: list[tuple[BlockDelta, list[dict[str, Any]]]] = []
        for number in range(max(1, len(new))):
            is_last = is_over and number + 1 >= len(new)
            ending = (delta.finish_reason, delta.stop_reason) if is_last else (None, None)
            self._pending += new[number : number + 1]
            text = self._text.take_in(delta.token_ids[number : number + 1], *ending)
            grown += [(each, self._taken_by(each)) for each in self.blocks.feed(text, is_last=is_last)]
        last = len(self.blocks.blocks) - 1
        if is_over and self._pending and isinstance(self.blocks.blocks[last], TextBlock):  # final tokens without text
            grown.append((BlockDelta(last, self.blocks.blocks[last], "", is_new=False), self._pending))
            self.logprobs_of.setdefault(last, []).extend(self._pending)
        return grown

    def _taken_by(self, growth: BlockDelta) -> list[dict[str, Any]]:
        if not isinstance(growth.block, TextBlock):
            self._is_behind_other = True
            return []
        if not growth.added:
            return []
        taken, self._pending = self._pending, []
        if self._is_behind_other:
            taken, self._is_behind_other = _last(taken, len(growth.added)), False
        self.logprobs_of.setdefault(growth.number, []).extend(taken)
        return taken


def _last(token_logprobs: list[dict[str, Any]], num_characters: int) -> list[dict[str, Any]]:
    """Return those of the last tokens, enough to cover this many characters."""
    first = len(token_logprobs)
    while first and num_characters > 0:
        first -= 1
        num_characters -= len(token_logprobs[first]["token"])
    return token_logprobs[first:]


class ResponsesErrors(ErrorEnvelope):
    """OpenAI's envelope; in streams, an event of this API."""

    def event(self, body: bytes) -> bytes:
        error = json.loads(body)["error"]
        fields = {"type": "error", "code": error["code"], "message": error["message"], "param": error["param"]}
        return b"event: error\ndata: " + json.dumps({**fields, "sequence_number": 0}).encode() + b"\n\n"


class ResponseAnswer(ChatAnswer[ResponsesRequest]):
    """A response.

    Args:
        store: where to store it, unless the request says otherwise.
        earlier: the conversation that it continues.

    Attributes:
        chat: the conversation before it, without instructions.
    """

    ID, PARAM = "resp_", "input"

    def __init__(
        self, body: ResponsesRequest, service: Service, info: ModelInfo, store: ResponseStore, earlier: Chat
    ) -> None:
        self._conversations, self._store = store, None if body.store is False else store
        self._kept = StoredResponse(b"", ())
        self.chat = (*earlier, *body.messages)
        super().__init__(body, service, info)

    def written(self, service: Service, info: ModelInfo) -> RenderedChat:
        return _prompt(self.body, self.chat, service, info)

    def whole(self, output: RequestOutput) -> bytes:
        read = AnswerReader(self)
        read.feed(output.outputs[0])
        answer = to_json(_finished(self, output, read))
        self.remember(answer, read.blocks)
        return answer

    def remember(self, answer: bytes, read: Blocks) -> None:
        """Take the finished response, in JSON, for `keep`."""
        self._kept = StoredResponse(answer, (*self.chat, *map(message_of, read.blocks)))

    def keep(self) -> None:
        if self._store is not None:
            self._store.put(self.generation.request_id, self._kept)
        if self.body.conversation is not None:
            items = [*stored_items(items_of(self.body.input)), *json.loads(self._kept.answer)["output"]]
            self._conversations.extend(self.body.conversation, items)

    def events(self) -> "ResponseEvents":
        return ResponseEvents(self)


def _prompt(body: ResponsesRequest, chat: Chat, service: Service, info: ModelInfo) -> RenderedChat:
    """Return the rendered conversation; if it is too long and `truncation` allows it, only later turns."""
    system: Chat = () if body.instructions is None else ({"role": "system", "content": body.instructions},)
    prompt, whole = body.for_template(service.settings), (*system, *chat)

    def write(messages: Chat) -> RenderedChat:
        written = {**prompt, "messages": with_names(with_calls_joined(messages))}
        return service.written(written, info, "input", body.reasoning_options)

    if body.truncation != "auto":
        return write(whole)
    written = _unless_long(write, whole)
    if written is not None and len(written.token_ids) < info.max_model_len:
        return written
    most = info.max_model_len - info.max_model_len // SHARE_FOR_OUTPUT
    begins = [i for i, message in enumerate(chat) if message["role"] == "user"]
    first, last = 1, len(begins) - 1  # finds the first turn from which the rest fits, else the last one
    while first <= last:
        middle = (first + last) // 2
        kept = tuple(message for message in chat[: begins[middle]] if message["role"] == "system")
        whole = (*system, *kept, *chat[begins[middle] :])
        written = _unless_long(write, whole)
        if first == last:
            break
        fits = written is not None and len(written.token_ids) <= most
        first, last = (first, middle) if fits else (middle + 1, last)
    return write(whole) if written is None else written


def _unless_long(write: Callable[[Chat], RenderedChat], chat: Chat) -> RenderedChat | None:
    """Return the chat; None if its text is too long by characters alone."""
    try:
        return write(chat)
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        return None


def running(answer: ResponseAnswer) -> dict[str, Any]:
    """Return the response before it has any output."""
    return response_of(answer, "in_progress")


def _finished(answer: ResponseAnswer, output: RequestOutput, read: AnswerReader) -> dict[str, Any]:
    """Return the finished response, with one output item for each block."""
    (completion,) = output.outputs
    is_cut, blocks = completion.finish_reason == "length", read.blocks.blocks
    items = [item(answer, block, "completed", read.logprobs_of.get(i, ())) for i, block in enumerate(blocks)]
    if is_cut:
        items[-1]["status"] = "incomplete"
    return response_of(
        answer,
        "incomplete" if is_cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        completed_at=None if is_cut else int(time.time()),
        output=items,
        usage=usage_of(output, answer.num_reasoning_tokens(read.blocks) or 0),
    )


def failed(answer: ResponseAnswer, error: ApiError) -> dict[str, Any]:
    """Return the response after an error."""
    codes = {429: "rate_limit_exceeded"}
    code = codes.get(error.status, "server_error" if error.status >= 500 else "invalid_prompt")
    return response_of(answer, "failed", error={"code": code, "message": str(error)})


def item_id(block: Block) -> str:
    """Return the id of the block's output item."""
    prefix = {TextBlock: "msg", ReasoningBlock: "rs", CallBlock: "fc"}[type(block)]
    return f"{prefix}_{block.key}"


def item(
    answer: ResponseAnswer, block: Block, status: str, token_logprobs: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return a message, reasoning or a tool call as an output item.

    Args:
        token_logprobs: the log-probabilities of a message's tokens.
    """
    head = {"id": item_id(block), "status": status}
    if isinstance(block, TextBlock):
        return {**head, "type": "message", "role": "assistant", "content": [part(block.text, token_logprobs)]}
    if isinstance(block, ReasoningBlock):
        encoded = {"encrypted_content": encoded_reasoning(block.text)} if ENCODED in (answer.body.include or ()) else {}
        return {**head, "type": "reasoning", "summary": [], "content": [reasoning_part(block.text)], **encoded}
    called = next((each for each in answer.body.functions if each.tool.function.name == block.name), None)
    names = (
        {"name": block.name} if called is None else called.model_dump(include={"name", "namespace"}, exclude_none=True)
    )
    return {**head, "type": "function_call", "call_id": block.call_id, **names, "arguments": block.arguments}


def part(text: str, token_logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": token_logprobs}


def reasoning_part(text: str) -> dict[str, Any]:
    """Return the content of reasoning."""
    return {"type": "reasoning_text", "text": text}


def message_of(block: Block) -> dict[str, Any]:
    """Return a message, reasoning or a tool call in the form of chat templates."""
    if isinstance(block, TextBlock):
        return {"role": "assistant", "content": block.text}
    if isinstance(block, ReasoningBlock):
        return {"role": "assistant", "content": "", "reasoning_content": block.text}
    call = call_for_template(block.call_id, block.name, block.arguments)
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def response_of(answer: ResponseAnswer, status: str, **others: Any) -> dict[str, Any]:
    """Return a response object. Unsupported fields get their effective value."""
    body, params = answer.body, answer.generation.params
    form = None if body.text is None else body.text.format
    choice = body.tool_choice or "auto"
    shown_choice = choice if isinstance(choice, str) else choice.model_dump()
    return {
        "id": answer.generation.request_id,
        "object": "response",
        "created_at": answer.created_at,
        "status": status,
        "background": answer.body.background is True,
        "completed_at": None,
        "conversation": None if body.conversation is None else {"id": body.conversation},
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": answer.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": form or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": shown_choice,
        "tools": [tool.model_dump() for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        **others,
    }


def usage_of(output: RequestOutput, num_reasoning_tokens: int) -> dict[str, Any]:
    num_input, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": output.metrics.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": num_input + num_output,
    }


class ResponseEvents(Events):
    """Writes the events of one response, in the order that OpenAI's clients expect. A token costs little to encode."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer, self._read = answer, AnswerReader(answer)
        self._number = 0
        self._has_logprobs = True  # whether the latest item may have some
        self._head = b""  # the beginning of each delta event of the latest item

    def write(self, deltas: list[TextDelta]) -> bytes:
        events = b"" if self._number else self._created()
        for delta in deltas:
            events += b"".join(self._grown(*grown) for grown in self._read.feed(delta))
        return events

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the last events, which repeat the streamed content."""
        response = _finished(self._answer, outputs[0], self._read)
        self._answer.remember(to_json(response), self._read.blocks)
        self._answer.keep()
        return self._ended(response["output"][-1]) + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        begin = b"" if self._number else self._created()
        return begin + self._event("response.failed", response=failed(self._answer, error))

    def _created(self) -> bytes:
        response = running(self._answer)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _grown(self, growth: BlockDelta, token_logprobs: list[dict[str, Any]]) -> bytes:
        """Return a delta's events: for a new item, the previous item's end and its own start; then the addition."""
        events = b""
        if growth.is_new:
            if before := growth.number:
                block, of_block = self._read.blocks.blocks[before - 1], self._read.logprobs_of.get(before - 1, ())
                events = self._ended(item(self._answer, block, "completed", of_block))
            events += self._begun(growth.number, growth.block)
        return events + self._added(growth.added, token_logprobs) if growth.added or token_logprobs else events

    def _begun(self, index: int, block: Block) -> bytes:
        self._has_logprobs = isinstance(block, TextBlock)
        place = {"item_id": item_id(block), "output_index": index}
        nothing: dict[str, Any] = {"arguments": ""} if isinstance(block, CallBlock) else {"content": []}
        begun = {**item(self._answer, block, "in_progress"), **nothing}
        events = self._event("response.output_item.added", output_index=index, item=begun)
        kind = "response.function_call_arguments.delta"
        if not isinstance(block, CallBlock):
            place["content_index"] = 0
            is_reasoning = isinstance(block, ReasoningBlock)
            begun_part = reasoning_part("") if is_reasoning else part("")
            events += self._event("response.content_part.added", **place, part=begun_part)
            kind = f"response.{'reasoning' if is_reasoning else 'output'}_text.delta"
        self._head = b"event: %b\ndata: %b," % (kind.encode(), to_json({"type": kind, **place})[:-1])
        return events

    def _added(self, text: str, token_logprobs: list[dict[str, Any]]) -> bytes:
        """Return the event that adds `text` to the latest item."""
        logprobs = b',"logprobs":%b' % to_json(token_logprobs) if self._has_logprobs else b""
        event = self._head + b'"sequence_number":%d,"delta":%b%b}\n\n' % (self._number, to_json(text), logprobs)
        self._number += 1
        return event

    def _ended(self, ended: dict[str, Any]) -> bytes:
        """Return the events that end an item."""
        index = next(i for i, block in enumerate(self._read.blocks.blocks) if item_id(block) == ended["id"])
        place = {"item_id": ended["id"], "output_index": index}
        if ended["type"] == "function_call":
            what = {"name": ended["name"], "arguments": ended["arguments"]}
            events = self._event("response.function_call_arguments.done", **place, **what)
        else:
            (text,) = ended["content"]
            place["content_index"] = 0
            if ended["type"] == "reasoning":
                events = self._event("response.reasoning_text.done", **place, text=text["text"])
            else:
                events = self._event("response.output_text.done", **place, text=text["text"], logprobs=text["logprobs"])
            events += self._event("response.content_part.done", **place, part=text)
        return events + self._event("response.output_item.done", output_index=index, item=ended)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = to_json({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
