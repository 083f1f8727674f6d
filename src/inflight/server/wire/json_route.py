"""`JsonRoute`: how a body is read as JSON. Strictly: no half characters, no NaN, no number that is none here.

What Python's own reader lets through (and cannot be written out again) is refused before anybody sees it.
"""

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response


class JsonRoute(APIRoute):
    """A route whose body is strict JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_and_handle(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return read_and_handle


class _JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return msgspec.json.decode(await self.body())
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # The only kind of error that FastAPI hands on from here.
            raise HTTPException(400, f"the body is not JSON: {_reason(await self.body(), error)}") from error


def _reason(body: bytes, error: Exception) -> str:
    """In the words of Python's own reader, which says where, if it refuses the body, too."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    try:
        json.loads(body)
    except ValueError as reason:
        return str(reason)
    return "it has a number that is too large or none at all (NaN, Infinity), or half of a surrogate pair"
