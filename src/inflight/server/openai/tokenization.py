"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as in vLLM."""

from typing import Annotated, ClassVar

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from inflight.contracts.api.model_info import ModelInfo
from inflight.server.openai.chat_request import MAX_MESSAGES, Message, TemplateFields
from inflight.server.serving.service import Service, service_of
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.json_route import json_response
from inflight.server.wire.off_loop import off_loop
from inflight.server.wire.strict_model import Many, StrictModel

MAX_TOKENS = 2**18
"""Most tokens: decoding takes 100 ns each, and holds the GIL."""

OF_CHATS = ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs")
"""Fields of the chat template's application."""


class TokenizeRequest(TemplateFields):
    """A text or a chat.

    Attributes:
        add_special_tokens: whether a text gets the special tokens that the tokenizer puts around it (null: yes); a chat
            has those that its template writes.
        return_token_strs: also return each token's name in the vocabulary.
    """

    NOT_SUPPORTED: ClassVar = {"tools": ([],)}
    MAY_HAVE_MORE = True

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(StrictModel):
    """Token ids."""

    MAY_HAVE_MORE = True

    model: str | None = None
    tokens: Many[int]


async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The token ids of a text or of a chat."""
    service = service_of(request)
    service.adapter_of(body.model)
    info = await service.model_info()
    size = len(await request.body()) + await service.fetch_items(info)
    return await off_loop(size, lambda: _tokenized(body, service, info))


def _tokenized(body: TokenizeRequest, service: Service, info: ModelInfo) -> Response:
    token_ids = _token_ids(body, service, info)
    names = service.tokenizer.inner.convert_ids_to_tokens(token_ids) if body.return_token_strs else None
    answer = {"count": len(token_ids), "max_model_len": info.max_model_len, "tokens": token_ids, "token_strs": names}
    return json_response(answer)


def _token_ids(body: TokenizeRequest, service: Service, info: ModelInfo) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "either prompt or messages must be given, and not both", param="prompt")
    if body.prompt is None:
        if body.add_special_tokens:
            message = "add_special_tokens is True; a chat has only the special tokens that its template writes"
            raise ApiError(400, message, param="add_special_tokens")
        return service.token_ids(body.for_template(service.settings), info, "messages")
    for name in OF_CHATS:
        if getattr(body, name):
            raise ApiError(400, f"{name} is given with a prompt; it goes with messages only", param=name)
    if not body.prompt:
        return []
    special = body.add_special_tokens is not False
    return service.token_ids(body.prompt, info, "prompt", add_special_tokens=special)


async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service = service_of(request)
    service.adapter_of(body.model)
    info = await service.model_info()
    return await off_loop(len(await request.body()), lambda: _text(body, service, info))


def _text(body: DetokenizeRequest, service: Service, info: ModelInfo) -> Response:
    if len(body.tokens) > MAX_TOKENS:
        message = f"tokens has {len(body.tokens)} token ids; this server takes at most {MAX_TOKENS}"
        raise ApiError(400, message, param="tokens")
    for token_id in body.tokens:
        if not 0 <= token_id < info.vocab_size:
            message = f"tokens contains {token_id}; the model's vocabulary has the ids from 0 to {info.vocab_size - 1}"
            raise ApiError(400, message, param="tokens")
    text = service.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


async def tokenizer_info(request: Request) -> Response:
    """Facts about the tokenizer for evaluation harnesses, under the names of its configuration file."""
    inner = service_of(request).tokenizer.inner
    answer = {
        "tokenizer_class": type(inner).__name__,
        "model_max_length": inner.model_max_length,
        "chat_template": inner.chat_template,
        **inner.special_tokens_map,
    }
    return json_response(answer)
