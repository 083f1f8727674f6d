"""Endpoints about the server itself: models, version, metrics and health."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from fastapi import Request
from starlette.responses import JSONResponse, Response

from inflight import __version__
from inflight.server.wire.api_errors import ApiError


class Catalog(Protocol):
    """The models of an application: one with its adapters, or several. Its `state.catalog`."""

    def check_ready(self) -> None:
        """Raise `ApiError` while no request can be answered."""

    async def cards(self) -> list[dict[str, Any]]:
        """The models, as OpenAI's API describes them."""

    async def card(self, name: str) -> dict[str, Any]:
        """One of them, under any of its names. Raises `ApiError` (404)."""


def _catalog(request: Request) -> Catalog:
    catalog: Catalog = request.app.state.catalog
    return catalog


async def health(request: Request) -> Response:
    """200 when ready; 503 while the engine is loading, restarting, or unable to start."""
    _catalog(request).check_ready()
    return Response(status_code=200)


async def version() -> Response:
    """The version of inflight."""
    return JSONResponse({"version": __version__})


async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    endpoint: Callable[[Request], Awaitable[Response]] | None = getattr(request.app.state, "metrics", None)
    if endpoint is None:
        raise ApiError(404, f"there is no {request.url.path}", code="not_found")
    return await endpoint(request)


async def models(request: Request) -> Response:
    """The models that are served, and their adapters."""
    return JSONResponse({"object": "list", "data": await _catalog(request).cards()})


async def model(name: str, request: Request) -> Response:
    """A model, under any of its names, or an adapter."""
    return JSONResponse(await _catalog(request).card(name))
