"""The response object of `/v1/responses`: decides what it says of a request that runs, has finished or has failed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.contracts.outputs import CompletionOutput, RequestOutput, TextDelta
from inflight.server.openai import logprobs
from inflight.server.responses.request import Chat, ResponsesRequest
from inflight.server.serving.generation import Job
from inflight.server.tools.blocks import Block, TextBlock
from inflight.server.tools.in_templates import call_for_template
from inflight.server.tools.tool_use import ToolUse
from inflight.server.wire.api_errors import ApiError
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be run.

    Attributes:
        chat: the conversation that it goes on with, without instructions.
        tools: how calls are read, if tools may be called.
        created_at: seconds of Unix time.
    """

    body: ResponsesRequest
    job: Job
    chat: Chat
    tokenizer: Tokenizer | None
    model_name: str
    tools: ToolUse | None
    created_at: int


def running(asked: Asked) -> dict[str, Any]:
    """While there is nothing to show yet."""
    return _response(asked, "in_progress")


def finished(asked: Asked, output: RequestOutput, blocks: Sequence[Block]) -> dict[str, Any]:
    """With its output, at its end: an item for each block."""
    (completion,) = output.outputs
    is_cut = completion.finish_reason == "length"
    told = told_logprobs(asked, completion)
    items = [item(block, "completed", told) for block in blocks]
    if is_cut:
        items[-1] = item(blocks[-1], "incomplete", told)
    return _response(
        asked,
        "incomplete" if is_cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        completed_at=None if is_cut else int(time.time()),
        output=items,
        usage=_usage_of(output),
    )


def failed(asked: Asked, error: ApiError) -> dict[str, Any]:
    """After it went wrong in the middle."""
    codes = {429: "rate_limit_exceeded"}
    code = codes.get(error.status, "server_error" if error.status >= 500 else "invalid_prompt")
    return _response(asked, "failed", error={"code": code, "message": str(error)})


def item_id(block: Block) -> str:
    """The id of its item of the output."""
    return f"msg_{block.key}" if isinstance(block, TextBlock) else f"fc_{block.key}"


def item(block: Block, status: str, told: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """A message or a call, as an item of the output.

    Args:
        told: the log-probabilities of a message's tokens.
    """
    head = {"id": item_id(block), "status": status}
    if isinstance(block, TextBlock):
        return {**head, "type": "message", "role": "assistant", "content": [part(block.text, told)]}
    return {
        **head,
        "type": "function_call",
        "call_id": block.call_id,
        "name": block.name,
        "arguments": block.arguments,
    }


def part(text: str, told: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The content of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": told}


def message_of(block: Block) -> dict[str, Any]:
    """A message or a call, as templates take it when the conversation goes on."""
    if isinstance(block, TextBlock):
        return {"role": "assistant", "content": block.text}
    try:
        call = call_for_template(block.call_id, block.name, block.arguments, "the answer")
    except ApiError:  # it was cut off
        call = call_for_template(block.call_id, block.name, "", "the answer")
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def told_logprobs(asked: Asked, news: CompletionOutput | TextDelta) -> list[dict[str, Any]]:
    """Of each new token, if they are wanted."""
    num_top = asked.body.num_logprobs
    if num_top is None:
        return []
    return logprobs.of_chat(news.token_ids, news.logprobs or [], num_top, asked.tokenizer)


def _response(asked: Asked, status: str, **others: Any) -> dict[str, Any]:
    """Fields that this server does not have are told with the value that they have anyway."""
    body, params = asked.body, asked.job.params
    form = None if body.text is None else body.text.format
    choice = body.tool_choice or "auto"
    told_choice = choice if isinstance(choice, str) else choice.model_dump()
    return {
        "id": asked.job.request_id,
        "object": "response",
        "created_at": asked.created_at,
        "status": status,
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": asked.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": form or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": told_choice,
        "tools": [tool.model_dump() for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        **others,
    }


def _usage_of(output: RequestOutput) -> dict[str, Any]:
    num_input, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": output.metrics.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input + num_output,
    }
