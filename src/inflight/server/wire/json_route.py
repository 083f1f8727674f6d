"""`JsonRoute` reads bodies as strict JSON: no lone surrogates, no NaN, no infinities, no numbers that overflow.

Python's own parser accepts these, although they cannot be written out again; here they are refused before an endpoint
sees them. `to_json` writes answers.
"""

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response

to_json = msgspec.json.encode


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
            # The only kind of exception that FastAPI passes on from here.
            raise HTTPException(400, f"the body is not JSON: {_reason(await self.body(), error)}") from error


def _reason(body: bytes, error: Exception) -> str:
    """Return the message of Python's own parser, which names the position, if that parser refuses the body, too."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    try:
        json.loads(body)
    except ValueError as reason:
        return str(reason)
    return "it has a number that is too large or none at all (NaN, Infinity), or half of a surrogate pair"
