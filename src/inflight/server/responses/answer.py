"""The response object of `/v1/responses`: decides what it contains while a request runs, after it ended or failed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.contracts.outputs import CompletionOutput, RequestOutput, TextDelta
from inflight.server.chat_format.answer_form import AnswerForm
from inflight.server.chat_format.blocks import Block, CallBlock, TextBlock, ThoughtBlock
from inflight.server.chat_format.tools import call_for_template
from inflight.server.openai import logprobs
from inflight.server.responses.request import ENCODED, Chat, ResponsesRequest, encoded_thought
from inflight.server.responses.scored_blocks import ScoredBlocks
from inflight.server.serving.generation import Generation
from inflight.server.wire.api_errors import ApiError
from inflight.text.output_text import OutputText
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A responses request that is ready to run.

    Attributes:
        chat: the conversation that it continues, without instructions.
        form: how thoughts and tool calls are read, if there may be any.
        created_at: seconds of Unix time.
    """

    body: ResponsesRequest
    generation: Generation
    chat: Chat
    tokenizer: Tokenizer | None
    model_name: str
    form: AnswerForm | None
    created_at: int

    def blocks(self) -> ScoredBlocks:
        """What an answer that begins is divided into."""
        return ScoredBlocks(None if self.form is None else self.form.make_reader())


def read_whole(prepared: PreparedResponse, output: RequestOutput) -> ScoredBlocks:
    """Divide a whole answer into blocks: token by token, if log-probabilities are wanted."""
    blocks, (completion,) = prepared.blocks(), output.outputs
    if prepared.body.num_logprobs is None or prepared.tokenizer is None:
        blocks.feed(completion.text, is_last=True)
        return blocks
    text = OutputText.of_request(prepared.tokenizer, output.prompt_token_ids, prepared.generation.params)
    scores = new_logprobs(prepared, completion)
    for number, (token_id, score) in enumerate(zip(completion.token_ids, scores, strict=True), 1):
        is_last = number == len(completion.token_ids)
        ending = (completion.finish_reason, completion.stop_reason) if is_last else (None, None)
        blocks.see([score])
        for growth in blocks.feed(text.take_in([token_id], *ending), is_last=is_last):
            blocks.taken_by(growth)
    blocks.rest()
    return blocks


def running(prepared: PreparedResponse) -> dict[str, Any]:
    """Return the response before it has any output."""
    return _response(prepared, "in_progress")


def finished(prepared: PreparedResponse, output: RequestOutput, read: ScoredBlocks) -> dict[str, Any]:
    """Return the finished response, with one output item for each block."""
    (completion,) = output.outputs
    is_cut, blocks = completion.finish_reason == "length", read.blocks
    num_thought_tokens = 0
    if prepared.form is not None and prepared.tokenizer is not None:
        num_thought_tokens = read.num_thought_tokens(prepared.tokenizer)
    items = [item(prepared, block, "completed", read.scores.get(i, ())) for i, block in enumerate(blocks)]
    if is_cut:
        items[-1]["status"] = "incomplete"
    return _response(
        prepared,
        "incomplete" if is_cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        completed_at=None if is_cut else int(time.time()),
        output=items,
        usage=_usage_of(output, num_thought_tokens),
    )


def failed(prepared: PreparedResponse, error: ApiError) -> dict[str, Any]:
    """Return the response after an error in the middle of it."""
    codes = {429: "rate_limit_exceeded"}
    code = codes.get(error.status, "server_error" if error.status >= 500 else "invalid_prompt")
    return _response(prepared, "failed", error={"code": code, "message": str(error)})


def item_id(block: Block) -> str:
    """Return the id of the block's output item."""
    prefix = {TextBlock: "msg", ThoughtBlock: "rs", CallBlock: "fc"}[type(block)]
    return f"{prefix}_{block.key}"


def item(
    prepared: PreparedResponse, block: Block, status: str, token_logprobs: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Return a message, a thought or a tool call as an output item.

    Args:
        token_logprobs: the log-probabilities of a message's tokens.
    """
    head = {"id": item_id(block), "status": status}
    if isinstance(block, TextBlock):
        return {**head, "type": "message", "role": "assistant", "content": [part(block.text, token_logprobs)]}
    if isinstance(block, ThoughtBlock):
        encoded = {"encrypted_content": encoded_thought(block.text)} if ENCODED in (prepared.body.include or ()) else {}
        return {**head, "type": "reasoning", "summary": [], "content": [thought_part(block.text)], **encoded}
    called = next((each for each in prepared.body.functions if each.tool.function.name == block.name), None)
    names = (
        {"name": block.name} if called is None else called.model_dump(include={"name", "namespace"}, exclude_none=True)
    )
    return {**head, "type": "function_call", "call_id": block.call_id, **names, "arguments": block.arguments}


def part(text: str, token_logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": token_logprobs}


def thought_part(text: str) -> dict[str, Any]:
    """Return the content of a thought."""
    return {"type": "reasoning_text", "text": text}


def message_of(block: Block) -> dict[str, Any]:
    """Return a message, a thought or a tool call as templates expect it when the conversation continues."""
    if isinstance(block, TextBlock):
        return {"role": "assistant", "content": block.text}
    if isinstance(block, ThoughtBlock):
        return {"role": "assistant", "content": "", "reasoning_content": block.text}
    call = call_for_template(block.call_id, block.name, block.arguments)
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def new_logprobs(prepared: PreparedResponse, news: CompletionOutput | TextDelta) -> list[dict[str, Any]]:
    """Return the log-probabilities of the new tokens, if requested."""
    num_top = prepared.body.num_logprobs
    if num_top is None:
        return []
    return logprobs.of_chat(news.token_ids, news.logprobs or [], num_top, prepared.tokenizer)


def _response(prepared: PreparedResponse, status: str, **others: Any) -> dict[str, Any]:
    """Return a response object. Fields that this server does not implement get the value that applies to them."""
    body, params = prepared.body, prepared.generation.params
    form = None if body.text is None else body.text.format
    choice = body.tool_choice or "auto"
    shown_choice = choice if isinstance(choice, str) else choice.model_dump()
    return {
        "id": prepared.generation.request_id,
        "object": "response",
        "created_at": prepared.created_at,
        "status": status,
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": prepared.model_name,
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


def _usage_of(output: RequestOutput, num_thought_tokens: int) -> dict[str, Any]:
    num_input, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": output.metrics.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_thought_tokens},
        "total_tokens": num_input + num_output,
    }
