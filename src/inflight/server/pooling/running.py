"""`pooled`: runs a pooling request for a client, notifies the observer, and maps errors."""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from inflight.contracts.api.errors import EngineDeadError, InvalidRequestError, QueueFullError
from inflight.contracts.api.params import SamplingParams
from inflight.entrypoints.async_llm import AsyncLLM
from inflight.server.serving.observer import EndReason
from inflight.server.serving.service import service_of
from inflight.server.serving.streams import attended
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.json_route import json_response
from inflight.server.wire.strict_model import Many, StrictModel

Output = TypeVar("Output")

MAX_TEXTS = 2048
"""Most texts of one request; OpenAI's limit."""
AS_ONE = SamplingParams(max_tokens=None)
"""The sampling parameters reported to observers of pooling requests."""

Texts = str | Many[int] | Many[str] | Many[Many[int]]
"""A text, token ids, or a list of either."""


class PoolingBody(StrictModel):
    """What the bodies of all these requests have.

    Attributes:
        truncate_prompt_tokens: the most tokens of a text, or of a pair, beyond which it is cut (-1: the model's limit);
            null: a longer one is refused.
    """

    IGNORED: ClassVar = {"user", "priority", "request_id"}
    MAY_HAVE_MORE = True

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None


def as_list(texts: Any) -> list[Any]:
    """Texts as a list, in whichever form they were sent. An empty list has none."""
    return [texts] if isinstance(texts, str) or (texts and isinstance(texts[0], int)) else list(texts)


async def pooled(
    request: Request,
    model: str | None,
    texts: Sequence[Any],
    param: str,
    run: Callable[[AsyncLLM], Coroutine[Any, Any, list[Output]]],
) -> list[Output]:
    """Return the result of `run`.

    Args:
        model: the model's name in the request.
        texts: the texts of the request.
        param: the request's field that has them.
        run: calls the model.

    Raises:
        ApiError: the model is unknown or has another task, there are too many texts, or they could not be run.
    """
    service = service_of(request)
    service.adapter_of(model)
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise ApiError(400, f"{param} has {len(texts)} texts; it must have from 1 to {MAX_TEXTS}", param=param)
    request_id = f"pool-{uuid.uuid4().hex}"
    async with attended(request.receive, service.settings.request_timeout) as client:
        await service.model_info()
        task = asyncio.create_task(run(service.llm))
        service.pooling.add(task)
        service.observer.started(request_id, 1, AS_ONE)
        reason: EndReason = "error"
        try:
            outputs = await task
            reason = "stop"
        except QueueFullError:
            reason = "refused"
            raise
        except InvalidRequestError as error:
            reason = "refused"
            code = "context_length_exceeded" if "maximum context length" in str(error) else None
            raise ApiError(400, f"{param}: {error}", param=param, code=code) from error
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and not current.cancelling():  # `Service.abort_all` has cancelled the other
                reason = "abort"
                raise ApiError(503, "the request was aborted", code="aborted") from None
            reason = "timeout" if client.is_too_late else "abort"
            raise
        except EngineDeadError:
            raise
        except RuntimeError as error:
            message = f"the model could not be run on this request: {error}"
            raise ApiError(500, message, code="generation_failed") from error
        finally:
            service.pooling.discard(task)
            service.observer.finished(request_id, None, reason)
    return outputs


def head(request: Request, kind: str) -> dict[str, Any]:
    """The leading fields of vLLM's answers."""
    name = service_of(request).settings.model_name
    return {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": name}


def answer_of(request: Request, kind: str, data: list[dict[str, Any]], outputs: Sequence[Any]) -> Response:
    """An answer as vLLM's are."""
    return json_response({**head(request, kind), "data": data, "usage": usage_of(outputs)})


def usage_of(outputs: Sequence[Any]) -> dict[str, int]:
    """`usage` of outputs that have a `num_prompt_tokens`."""
    number = sum(output.num_prompt_tokens for output in outputs)
    return {"prompt_tokens": number, "total_tokens": number}
