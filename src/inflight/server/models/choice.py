"""Which model a request asks for. Decides what is said to those that name none, or one that there is not."""

from typing import Any

import msgspec

from inflight.server.models.pool import ModelPool
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.json_route import not_json


class _Wanted(msgspec.Struct):
    """What a body says about the model and how it wants to be answered; all else is skipped."""

    model: msgspec.Raw = msgspec.Raw(b"null")
    stream: msgspec.Raw = msgspec.Raw(b"null")


def read_choice(body: bytes) -> tuple[object, bool]:
    """Return a body's `model`, whatever it is, and whether it asks for a stream. Raises `ApiError`."""
    if not body:
        raise ApiError(400, "the body is empty; it must be a JSON object")
    try:
        wanted = msgspec.json.decode(body, type=_Wanted)
        return msgspec.json.decode(wanted.model), bytes(wanted.stream) == b"true"
    except msgspec.ValidationError as error:
        raise ApiError(400, "the body must be a JSON object") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise not_json(body, error) from error


def chosen(pool: ModelPool[Any], name: object) -> str:
    """Return the name of a request's model, which may have been asked for by its adapter's. Raises `ApiError` if there
    is none such, or more than one and no choice."""
    names = list(pool)
    listed = ", ".join(map(repr, (*names, *pool.adapters)))
    if name is None:
        if len(names) == 1:
            return names[0]
        message = f"model is missing; this server has {listed}"
        raise ApiError(400, message, param="model", code="missing_required_parameter")
    if not isinstance(name, str):
        raise ApiError(400, f"model is {str(name)[:200]}; it should be a valid string", param="model")
    name = pool.adapters.get(name, name)
    if name not in pool:
        message = f"there is no model {name[:200]!r}; this server has {listed}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return name
