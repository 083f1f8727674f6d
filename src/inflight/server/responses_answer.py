"""The response object of `/v1/responses`: decides what it says of a request that runs, has finished or has failed."""

import time
from dataclasses import dataclass
from typing import Any

from inflight.outputs import CompletionOutput, RequestOutput, TextDelta
from inflight.server import logprobs
from inflight.server.api_errors import ApiError
from inflight.server.generation import Job
from inflight.server.responses_request import Chat, ResponsesRequest
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be run.

    Attributes:
        chat: the conversation that it goes on with, without instructions.
        created_at: seconds of Unix time.
        item_id: of the message that will be its output.
    """

    body: ResponsesRequest
    job: Job
    chat: Chat
    tokenizer: Tokenizer | None
    model_name: str
    created_at: int
    item_id: str


def running(asked: Asked) -> dict[str, Any]:
    """While there is nothing to show yet."""
    return _response(asked, "in_progress")


def finished(asked: Asked, output: RequestOutput) -> dict[str, Any]:
    """With its output, at its end."""
    (completion,) = output.outputs
    is_cut = completion.finish_reason == "length"
    return _response(
        asked,
        "incomplete" if is_cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        completed_at=None if is_cut else int(time.time()),
        output=[item(asked, "incomplete" if is_cut else "completed", part(asked, completion))],
        usage=_usage_of(output),
    )


def failed(asked: Asked, error: ApiError) -> dict[str, Any]:
    """After it went wrong in the middle."""
    codes = {429: "rate_limit_exceeded"}
    code = codes.get(error.status, "server_error" if error.status >= 500 else "invalid_prompt")
    return _response(asked, "failed", error={"code": code, "message": str(error)})


def item(asked: Asked, status: str, *content: dict[str, Any]) -> dict[str, Any]:
    """The message that is its output."""
    return {"id": asked.item_id, "type": "message", "status": status, "role": "assistant", "content": content}


def part(asked: Asked, completion: CompletionOutput | None = None) -> dict[str, Any]:
    """The text of that message; None: still without any."""
    text, told = ("", []) if completion is None else (completion.text, told_logprobs(asked, completion))
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": told}


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
        "parallel_tool_calls": True,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {"format": form or {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
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
