"""The live page of a server with several models: it shows one of them, named in each request, by default the last used.
Viewing a model neither loads it nor keeps it loaded.
"""

from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlencode

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from inflight.server.live import endpoint
from inflight.server.models.loading import ServedModel
from inflight.server.models.pool import ModelPool
from inflight.server.models.route import again, chosen, own_scope
from inflight.server.wire.api_errors import ApiError


def add_live_pages(app: FastAPI) -> None:
    """Add the page to an application made by `create_models_app`."""
    for route in endpoint.router.routes:
        if isinstance(route, APIRoute):
            app.router.add_api_route(
                route.path, route.endpoint, methods=route.methods, tags=route.tags, route_class_override=_LiveRoute
            )
    endpoint.add_page(app, _page)


async def _page(request: Request) -> Response:
    """The page of the model in its address; by default the last used one."""
    pool = _pool(request)
    if "model" in request.query_params:
        return await endpoint.page()
    latest = max(pool.loaded() or pool, key=lambda name: pool.entry(name).last_use)
    return RedirectResponse(f"?{urlencode({'model': latest})}", 307, {"Cache-Control": "no-store"})


class _LiveRoute(APIRoute):
    """A route answered by a model's application, if loaded."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def hand_on(request: Request) -> Response:
            pool = _pool(request)
            name = chosen(pool, request.query_params.get("model"))
            model = pool.loaded().get(name)
            if model is None:
                raise ApiError(503, f"{name} is {pool.entry(name).state}; a request loads it", code="not_loaded")
            return _Shown(model, await request.body())

        return hand_on


class _Shown(Response):
    """The answer of a model's application."""

    def __init__(self, model: ServedModel, body: bytes) -> None:
        super().__init__()
        self._model, self._request_body = model, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._model.app(own_scope(scope), again(self._request_body, receive), send)


def _pool(request: Request) -> ModelPool[ServedModel]:
    pool: ModelPool[ServedModel] = request.app.state.models
    return pool
