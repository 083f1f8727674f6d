"""Error answers: an HTTP status and one sentence in OpenAI's error envelope.

Maps our errors to statuses, types and codes. Knows no endpoint.
"""

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from inflight.contracts.api.errors import EngineDeadError, InvalidRequestError, ModelError, QueueFullError

RETRY_AFTER_SECONDS = 1
"""Seconds before a refused client should retry: a full queue moves within a second."""

CLIENT_CLOSED_REQUEST = 499
"""The status (nginx's number) of a request whose client disconnected; it appears in logs and metrics only."""


class ApiError(Exception):
    """An error answer.

    Args:
        param: the request field that is wrong.
        code: a machine-readable name of what is wrong.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @classmethod
    def from_exception(cls, error: Exception) -> "ApiError":
        """Return the answer to a request that ended in `error`."""
        wait = {"Retry-After": str(RETRY_AFTER_SECONDS)}
        match error:
            case ApiError():
                return error
            case QueueFullError():
                return cls(429, str(error), kind="rate_limit_error", code="queue_full", headers=wait)
            case EngineDeadError():
                return cls(503, str(error), code="engine_dead", headers=wait)
            case ModelError():
                return cls(503, f"the model could not be loaded: {error}", code="model_error")
            case InvalidRequestError():
                return cls(400, str(error))
            case RequestValidationError():
                return cls.of_validation(error.errors(), num_outside=1)  # "body"
            case RecursionError():
                return cls(400, "the request is nested too deeply")
            case HTTPException():
                return cls(error.status_code, str(error.detail), headers=error.headers)
        return cls(500, "the server made a mistake while answering this request", code="internal_error")

    @classmethod
    def of_validation(cls, errors: Sequence[Any], num_outside: int = 0) -> "ApiError":
        """Return the answer to an invalid body, from pydantic's list of errors.

        It names the first wrong field; for a union, it lists what any of its members would have accepted.

        Args:
            num_outside: how many parts of the errors' paths are not in the body.
        """
        errors = [{**each, "loc": each["loc"][num_outside:]} for each in errors]
        errors = [each for each in errors if not _is_about_objects(each)] or errors
        first = errors[0]
        for error in errors:
            if (field := error.get("ctx", {}).get("field")) is not None:  # its message needs nothing added
                inside = [part for part in error["loc"] if _is_visible(part)]
                place = f"{_spelled(inside)}: " if inside else ""
                return cls(400, place + error["msg"], param=_spelled([*inside, field]), code=error["type"])
        path = [part for part in first["loc"] if _is_visible(part)]
        if not path:
            empty = first["type"] == "missing"
            return cls(400, f"the body {'is empty; it ' if empty else ''}must be a JSON object")
        where = _spelled(path)
        if first["type"] == "missing":
            return cls(400, f"{where} is missing", param=where, code="missing_required_parameter")
        said = list(dict.fromkeys(each["msg"] for each in errors if each["loc"][0] == first["loc"][0]))
        start = "Input should be "
        wanted = [message.removeprefix(start) for message in said if message.startswith(start)]
        others = [message[:1].lower() + message[1:] for message in said if not message.startswith(start)]
        sentence = ", or ".join([*([f"it should be {' or '.join(wanted)}"] if wanted else []), *others])
        return cls(400, f"{where} is {reprlib.repr(first.get('input'))}; {sentence}", param=where)


class ErrorEnvelope:
    """The error format of an API; this one is OpenAI's."""

    def body(self, error: ApiError, scope: Scope) -> bytes:
        """Return the answer's body, in ASCII because it quotes the request, lone surrogates included."""
        fields = {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}
        return json.dumps({"error": fields}).encode()

    def event(self, body: bytes) -> bytes:
        """Return a body as the last event of a stream."""
        return b"data: " + body + b"\n\n"

    def response(self, error: ApiError, scope: Scope) -> Response:
        """Return the whole answer."""
        return Response(self.body(error, scope), error.status, error.headers, media_type="application/json")


OPENAI_ERRORS = ErrorEnvelope()


class ClientGoneError(Exception):
    """The client no longer waits for the answer."""


def path_of(scope: Scope) -> str:
    """The routed path, without a proxy's prefix."""
    path, root = scope["path"], scope.get("root_path", "")
    return str(path.removeprefix(root) if path.startswith(f"{root}/") else path)


def errors_of(scope: Scope) -> ErrorEnvelope:
    """The error envelope of a request's API."""
    envelope: ErrorEnvelope = scope["app"].state.errors_of(path_of(scope))
    return envelope


def add_error_handlers(app: FastAPI, errors: Callable[[str], ErrorEnvelope]) -> None:
    """Make the application answer every error in an envelope.

    Args:
        errors: the envelope for each path.
    """
    app.state.errors_of = errors

    async def answer(request: Request, error: Exception) -> Response:
        return errors_of(request.scope).response(_api_error(request, error), request.scope)

    async def handle_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    ours = (ApiError, InvalidRequestError, QueueFullError, EngineDeadError, ModelError)
    for kind in (*ours, RequestValidationError, RecursionError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(ClientGoneError, handle_disconnect)


def _api_error(request: Request, error: Exception) -> ApiError:
    """Return the answer to `error`, with details from the request where they help."""
    if isinstance(error, HTTPException) and error.status_code == 404:
        return ApiError(404, f"there is no {request.url.path}", code="not_found")
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path} does not take {request.method}; it takes {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers)
    if isinstance(error, RequestValidationError) and isinstance(error.body, bytes):
        given = request.headers.get("content-type")
        message = f"the content type is {given!r}; send JSON with the header Content-Type: application/json"
        return ApiError(415, message, code="unsupported_media_type")
    return ApiError.from_exception(error)


def _is_about_objects(error: Any) -> bool:
    """Whether the error only says that objects are not a string; the errors about the objects themselves say more."""
    given = error["input"]
    return error["type"] == "string_type" and isinstance(given, list) and bool(given) and isinstance(given[0], dict)


def _is_visible(part: str | int) -> bool:
    """Whether a part of pydantic's path exists in the request; others name the union member that pydantic tried."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int", "float", "bool"))


def _spelled(path: Sequence[str | int]) -> str:
    """Write `["messages", 0, "role"]` as `messages[0].role`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
