"""`/v1/token_count`: the number of a text's tokens. An example of an endpoint."""

from fastapi import Request
from starlette.responses import Response

from inflight.server.serving.service import service_of
from inflight.server.wire.json_route import json_response
from inflight.server.wire.strict_model import StrictModel


class TokenCountRequest(StrictModel):
    """A text."""

    model: str | None = None
    text: str


async def token_count(body: TokenCountRequest, request: Request) -> Response:
    """Count a text's tokens."""
    service = service_of(request)
    service.adapter_of(body.model)
    tokenizer = service.llm.tokenizer
    return json_response({"tokens": 0 if tokenizer is None else len(tokenizer.encode(body.text))})
