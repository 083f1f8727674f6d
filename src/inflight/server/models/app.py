"""`create_models_app`: the application in front of those of several models.

Each loaded model has its own application, made by `create_app`, which answers its requests. Requests without a model
(files, batch jobs, stored responses, the list of models) are answered here.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute

from inflight import __version__
from inflight.server.app import IN_WORK_FOR_EACH_SLOT, batch_jobs
from inflight.server.endpoints import Endpoint, add_endpoints, errors_of_path
from inflight.server.models.loading import ModelLoad, ServedModel
from inflight.server.models.pool import ModelPool
from inflight.server.models.route import ModelRoute, PoolAnswerer, chosen
from inflight.server.responses.store import ResponseStore
from inflight.server.serving.observer import RequestObserver
from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import add_error_handlers
from inflight.server.wire.json_route import JsonRoute


def create_models_app(
    pool: ModelPool[ServedModel],
    loads: Mapping[str, ModelLoad],
    settings: ServerSettings,
    responses: ResponseStore,
    num_slots: int,
    observer: RequestObserver | None = None,
) -> FastAPI:
    """Return an ASGI application that serves all models of a pool, and unloads them with its end.

    Args:
        loads: the pool's models, with facts about unloaded ones.
        settings: those of all models.
        responses: the store of responses, shared by `loads`.
        num_slots: number of concurrent sequences, for batch jobs.
        observer: notified of batch jobs.

    Raises:
        ValueError: the folder for batch jobs cannot be used, or another process has it.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if jobs is not None:
            jobs.start()
        try:
            yield
        finally:
            if jobs is not None:
                await jobs.stop()
            await pool.close()
            responses.close()

    app = FastAPI(title="inflight", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.models, app.state.catalog = pool, PoolCatalog(pool, loads)
    app.state.settings, app.state.is_strict = settings, settings.strict
    app.state.addresses = settings.addresses
    app.state.responses = responses
    add_endpoints(app, _route_of)
    add_error_handlers(app, errors_of_path)
    jobs = None
    if settings.batch_dir is not None:
        max_in_work = IN_WORK_FOR_EACH_SLOT * num_slots
        jobs = batch_jobs(Path(settings.batch_dir), PoolAnswerer(pool), max_in_work, observer)
    app.state.batch_jobs = jobs
    return app


def _route_of(endpoint: Endpoint) -> type[APIRoute] | None:
    """The server's own service: stored responses of all models are found here by id."""
    return {"model": ModelRoute, "server": JsonRoute, "single model": None}[endpoint.answered_by]


class PoolCatalog:
    """The models of a pool and their adapters, which are loaded with their models; see `Catalog`."""

    def __init__(self, pool: ModelPool[ServedModel], loads: Mapping[str, ModelLoad]) -> None:
        self._pool, self._loads, self._start_time = pool, loads, int(time.time())

    def check_ready(self) -> None:
        """Always ready: requests load their models on demand."""

    async def cards(self) -> list[dict[str, Any]]:
        """See `Catalog`; with the state of each."""
        return [self._card(name) for name in (*self._pool, *self._pool.adapters)]

    async def card(self, name: str) -> dict[str, Any]:
        """See `Catalog`."""
        chosen(self._pool, name)
        return self._card(name)

    def _card(self, name: str) -> dict[str, Any]:
        """Return the card of a model or an adapter. `status` is that of llama.cpp's router."""
        parent = self._pool.adapters.get(name)
        entry, load = self._pool.entry(parent or name), self._loads[parent or name]
        status: dict[str, Any] = {"value": entry.state}
        if entry.failure is not None:
            status |= {"failed": True, "error": str(entry.failure.error)}
        card = {
            "id": name,
            "object": "model",
            "created": self._start_time,
            "owned_by": "inflight",
            "parent": parent,
            "status": status,
        }
        if (info := load.info) is None:
            return card
        return {**card, "max_model_len": info.max_model_len, "input_modalities": info.input_modalities}
