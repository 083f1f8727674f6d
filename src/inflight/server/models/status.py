"""Endpoints about a server of several models: which there are, and which of them are loaded."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from inflight.server.models.choice import chosen
from inflight.server.models.loading import ModelLoad, ServedModel
from inflight.server.models.pool import ModelPool
from inflight.server.serving.status import version

router = APIRouter()
router.add_api_route("/version", version)
router.add_api_route("/version", version, methods=["HEAD"], include_in_schema=False)


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> Response:
    """200: requests are taken, and their models loaded if they are not."""
    return Response(status_code=200)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """All models and their adapters, and the state of each."""
    return JSONResponse(
        {"object": "list", "data": [_card(request, name) for name in (*_pool(request), *_pool(request).adapters)]}
    )


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> Response:
    """One of them."""
    chosen(_pool(request), name)
    return JSONResponse(_card(request, name))


def _pool(request: Request) -> ModelPool[ServedModel]:
    pool: ModelPool[ServedModel] = request.app.state.models
    return pool


def _card(request: Request, name: str) -> dict[str, Any]:
    """Return the card of a model or an adapter, which is loaded with its model. `status` is that of llama.cpp's
    router."""
    pool = _pool(request)
    parent = pool.adapters.get(name)
    entry = pool.entry(parent or name)
    load: ModelLoad = request.app.state.loads[parent or name]
    status: dict[str, Any] = {"value": entry.state}
    if entry.failure is not None:
        status |= {"failed": True, "error": str(entry.failure.error)}
    card = {
        "id": name,
        "object": "model",
        "created": request.app.state.start_time,
        "owned_by": "inflight",
        "parent": parent,
        "status": status,
    }
    return card if load.info is None else {**card, "max_model_len": load.info.max_model_len}
