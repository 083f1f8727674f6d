"""Endpoints about the server itself: its model, its version, and whether it is ready."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from inflight import __version__
from inflight.contracts.errors import EngineDeadError, ModelError
from inflight.server.serving.service import Service, service_of
from inflight.server.wire.api_errors import ApiError

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """200 when requests are served at once; 503 while the engine is loading, restarting, or unable to start."""
    try:
        if service_of(request).llm.is_ready():
            return Response(status_code=200)
    except (EngineDeadError, ModelError) as error:
        raise ApiError.of(error) from error
    raise ApiError(503, "the engine is loading", code="engine_loading", headers={"Retry-After": "1"})


@router.head("/version", include_in_schema=False)
@router.get("/version")
async def version() -> Response:
    """The version of inflight."""
    return JSONResponse({"version": __version__})


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The model that is served."""
    return JSONResponse({"object": "list", "data": [await _card(service_of(request))]})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    """The model, under any of its names."""
    service = service_of(request)
    service.check_model(name)
    return JSONResponse(await _card(service))


async def _card(service: Service) -> dict[str, Any]:
    info = await service.model_info()
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": service.start_time,
        "owned_by": "inflight",
        "max_model_len": info.max_model_len,
    }
