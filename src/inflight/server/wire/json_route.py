"""`JsonRoute` reads bodies as strict JSON: no lone surrogates, no NaN, no infinities, no numbers that overflow.

Python's own parser accepts these, although they cannot be written out again; here they are refused before an endpoint
sees them. A large body is parsed and checked outside the event loop. One with too many values is refused, because the
parser holds the GIL to its end; one that is nested too deeply, because all that reads it recurses. `to_json` writes
answers.
"""

import json
import logging
import re
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.off_loop import off_loop
from inflight.server.wire.strict_model import NOWHERE, READING, RequestParsing

to_json = msgspec.json.encode


def json_response(content: Any) -> Response:
    """An answer in JSON."""
    return Response(to_json(content), media_type="application/json")


MAX_VALUES = 2**20
"""Most values of a body, as `_MARKS` count them. Reading that many takes a tenth of a second."""

MAX_DEPTH = 128
"""Most levels of objects and arrays in a body. Close to the recursion limit, even finalizers fail."""

_NO_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[^"\[\]{}]++', re.DOTALL)
"""What lies between brackets: strings and everything else."""

IGNORED_FIELDS_HEADER = "X-Inflight-Ignored-Fields"

_MARKS = {b",": 1, b":": 2, b"[": 3, b"{": 3}
"""Characters that bound the number of a body's values, including those in strings."""

_COUNTED_AT_ONCE = 2**20  # bytes; counting holds the GIL, too

logger = logging.getLogger("inflight.server")


class JsonRoute(APIRoute):
    """A route whose body is strict JSON. A header of the answer names ignored and replaced fields."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        model = None if self.body_field is None else self.body_field.field_info.annotation

        async def read_and_handle(request: Request) -> Response:
            state = request.app.state
            reading = RequestParsing(getattr(state, "is_strict", False), getattr(state, "addresses", NOWHERE))
            READING.set(reading)
            try:
                response = await handle(_JsonRequest(request, model))
            except HTTPException as error:
                if isinstance(error.__cause__, ApiError):  # FastAPI has replaced the error of `json`
                    raise error.__cause__ from None
                raise
            if ignored := reading.shown_ignored:
                response.headers[IGNORED_FIELDS_HEADER] = ignored
                logger.info("ignored fields of a request: %s", ignored)
            return response

        return read_and_handle


class _JsonRequest(Request):
    def __init__(self, request: Request, model: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        """Parse the body into a request model, which FastAPI then uses. Raises `ApiError`."""
        body = await self.body()
        return await off_loop(len(body), lambda: self._read(body))

    def _read(self, body: bytes) -> Any:
        if sum(_num_values(body, start) for start in range(0, len(body), _COUNTED_AT_ONCE)) > MAX_VALUES:
            counted = "by its commas, colons and brackets"
            raise ApiError(400, f"the body has more than {MAX_VALUES} values (counted {counted})")
        if _is_too_deep(body):
            raise ApiError(400, f"the body is nested too deeply, in more than {MAX_DEPTH} levels")
        try:
            given = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise not_json(body, error) from error
        return given if self._model is None else validated(self._model, given)


def validated(model: Any, given: Any) -> Any:
    """Return a body as a request model. Raises `ApiError`."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise ApiError.of_validation(error.errors(include_url=False)) from error


def not_json(body: bytes, error: Exception) -> ApiError:
    """Return the answer to a body that could not be decoded."""
    return ApiError(400, f"the body is not JSON: {_reason(body, error)}")


def _num_values(body: bytes, start: int) -> int:
    """Return an upper bound of the number of values in a part of the body."""
    return sum(times * body.count(mark, start, start + _COUNTED_AT_ONCE) for mark, times in _MARKS.items())


def _is_too_deep(body: bytes) -> bool:
    if body.count(b"{") + body.count(b"[") <= MAX_DEPTH:
        return False
    brackets = _NO_BRACKETS.sub(b"", body).replace(b"[", b"{").replace(b"]", b"}")
    for _ in range(MAX_DEPTH):  # each round removes the innermost level
        brackets = brackets.replace(b"{}", b"")
    return b"{}" in brackets


def _reason(body: bytes, error: Exception) -> str:
    """Return the message of Python's own parser, which names the position, if that parser refuses the body, too."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    try:
        json.loads(body)
    except ValueError as reason:
        return str(reason)
    return "it has a number that is too large or none at all (NaN, Infinity), or half of a surrogate pair"
