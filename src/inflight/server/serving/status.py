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
    """The model that is served, and its adapters."""
    service = service_of(request)
    cards = [await _card(service, adapter) for adapter in (None, *service.llm.adapters)]
    return JSONResponse({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    """The model, under any of its names, or an adapter."""
    service = service_of(request)
    return JSONResponse(await _card(service, service.adapter_of(name)))


async def _card(service: Service, adapter: str | None) -> dict[str, Any]:
    info = await service.model_info()
    return {
        "id": service.name_of(adapter),
        "object": "model",
        "created": service.start_time,
        "owned_by": "inflight",
        "root": service.settings.model_name if adapter is None else service.llm.adapters.get(adapter),
        "parent": None if adapter is None else service.settings.model_name,
        "max_model_len": info.max_model_len,
    }
