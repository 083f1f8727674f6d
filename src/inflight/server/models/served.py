"""`ServedModels`: assembles this package: settings in, an application and its metrics out.

The live page of a server with several models: it shows one of them, named in each request, by default the last used.
Viewing a model neither loads it nor keeps it loaded.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any
from urllib.parse import urlencode

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from inflight.contracts.api.config import EngineConfig, front_options
from inflight.engine.replicas.launch import check_replicas
from inflight.entrypoints.async_llm import AsyncLLM
from inflight.entrypoints.inputs import model_source
from inflight.host.machine import free_memory
from inflight.server.live import endpoint
from inflight.server.models.app import create_models_app
from inflight.server.models.load_scheduler import LoadScheduler
from inflight.server.models.loading import LivePage, ModelLoad, ServedModel, bytes_before_load, cache_limit
from inflight.server.models.metrics import PoolMetrics
from inflight.server.models.pool import ModelPool, PoolSettings
from inflight.server.models.route import again, chosen, own_scope
from inflight.server.responses.store import ResponseStore
from inflight.server.serving.observer import RequestObserver
from inflight.server.serving.settings import IN_MEMORY, ServerSettings
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


OF_ANSWERS = {field.name for field in fields(ServerSettings)} - {"model_name", "model_aliases", "batch_dir"}
"""Options of a single model for the server; all others are its engine's."""


class ServedModels:
    """Several models to serve. Make it in the serving process, with or without an event loop.

    Args:
        options: those of each engine, as `AsyncLLM` takes them, unless it has its own.
        settings: the server's; each model has its own name, and may override some.
        page: of the server; None: it has no live page.

    Attributes:
        metrics: of all models, and of the server.
        observers: for each model, observers of its requests; there may be more.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    def __init__(
        self,
        models: PoolSettings,
        options: Mapping[str, Any],
        settings: ServerSettings,
        page: LivePage | None = None,
    ) -> None:
        own = {name: models.own_options.get(name, {}) for name in models.models}
        engines = {
            name: _Engines.from_options({**options, **_without(OF_ANSWERS, own[name])}, models.num_loaded)
            for name in own
        }
        self._settings, self._has_page = settings, page is not None
        self._responses = ResponseStore(settings.response_store, settings.response_store_size)
        self._num_slots = max(each.num_slots for each in engines.values()) * models.num_loaded
        self._loads = {
            name: ModelLoad(
                partial(AsyncLLM, source, starts_at_once=True, **engines[name].options),
                _settings_of(name, settings, own[name]),
                self._responses,
                page,
            )
            for name, source in models.models.items()
        }
        self.metrics = PoolMetrics(self._loads)
        for name in set(models.adapters.values()):
            self.metrics.by_model[name].describe_adapters(engines[name].num_slots, of_several_models=True)
        self.observers: dict[str, list[RequestObserver]] = {}
        for name, load in self._loads.items():
            self.observers[name] = load.observer.observers
            self.observers[name].append(self.metrics.by_model[name])
        num_bytes = {
            name: bytes_before_load(
                str(model_source(source)), engines[name].cache_bytes or 0, engines[name].num_replicas
            )
            for name, source in models.models.items()
        }
        max_bytes = free_memory() if models.max_loaded_memory is None else models.max_loaded_memory
        self.pool = ModelPool(
            {name: self.metrics.counted(name, load) for name, load in self._loads.items()},
            LoadScheduler(num_bytes, models.num_loaded, max_bytes, models.idle_unload),
            adapters=models.adapters,
        )
        self.metrics.watch(self.pool)

    def make_app(self) -> FastAPI:
        """Return the application. Raises `ValueError` if the folder for batch jobs cannot be used."""
        app = create_models_app(self.pool, self._loads, self._settings, self._responses, self._num_slots, self.metrics)
        if self._has_page:
            add_live_pages(app)
        return app

    async def abort_all(self) -> None:
        """Abort all running requests; see `Service.abort_all`."""
        for model in self.pool.loaded().values():
            await model.service.abort_all()

    async def reload_weights(self) -> None:
        """Reload the loaded models; see `AsyncLLM.reload_weights`."""
        for name in self.pool.loaded():
            with self.pool.use(name) as use:
                await (await use.model()).llm.reload_weights()


@dataclass(frozen=True, slots=True)
class _Engines:
    """The configuration of one model's engines.

    Attributes:
        options: arguments of `AsyncLLM`.
        cache_bytes: the limit of the cache of each; None: it is given in blocks.
    """

    options: Mapping[str, Any]
    config: EngineConfig
    num_replicas: int
    cache_bytes: int | None

    @classmethod
    def from_options(cls, options: Mapping[str, Any], num_loaded: int) -> "_Engines":
        """Those of one model, where this many may be loaded at once. Raises `ValueError`."""
        fleet, config = front_options(_without({"tokenizer"}, options), "AsyncLLM")
        num_replicas = check_replicas(fleet.replicas, config.tensor_parallel_size)
        cache_bytes = cache_limit(config, num_replicas * num_loaded)
        if cache_bytes is not None and num_loaded > 1:
            options = {**options, "kv_cache_memory": cache_bytes}
        return cls(options, config, num_replicas, cache_bytes)

    @property
    def num_slots(self) -> int:
        """How many sequences run at once."""
        return self.config.scheduling.max_num_seqs * self.num_replicas


def _settings_of(name: str, settings: ServerSettings, own_options: Mapping[str, Any]) -> ServerSettings:
    """The settings of one model."""
    own = {option: value for option, value in own_options.items() if option in OF_ANSWERS}
    return replace(
        settings, **{**own, "model_name": name, "model_aliases": (), "batch_dir": None, "response_store": IN_MEMORY}
    )


def _without(names: set[str], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}
