"""`create_models_app`: the application in front of those of several models. Decides what it answers itself.

Each model that is loaded has an application of its own, as `create_app` makes it for one model. What a request asks a
model goes there; what belongs to no model (files, batch jobs, responses that are kept, the list of models) is answered
here.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from fastapi import FastAPI
from fastapi.routing import APIRoute

from inflight import __version__
from inflight.server.anthropic import errors as anthropic_errors
from inflight.server.app import IN_WORK_FOR_EACH_SLOT, OF_A_MODEL, OF_FILES, batch_jobs
from inflight.server.models import status
from inflight.server.models.answering import PoolAnswerer
from inflight.server.models.loading import ModelLoad, ServedModel
from inflight.server.models.pool import ModelPool
from inflight.server.models.route import ModelRoute
from inflight.server.responses.store import ResponseStore
from inflight.server.serving.observer import RequestObserver
from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import add_error_handlers


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
        loads: what the pool loads, for what is known of models that are not loaded.
        settings: those of all models.
        responses: what `loads` keep responses in.
        num_slots: how many sequences run at once, for batch jobs.
        observer: hears of batch jobs.

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

    app = FastAPI(title="inflight", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.models, app.state.loads, app.state.settings = pool, loads, settings
    app.state.responses, app.state.start_time = responses, int(time.time())
    app.state.is_strict = settings.strict
    for module in OF_A_MODEL:
        for route in module.router.routes:
            if isinstance(route, APIRoute):
                _add(app, route)
    for other in (*OF_FILES, status):
        app.include_router(other.router)
    add_error_handlers(app, {anthropic_errors.PATH: anthropic_errors.answer})
    jobs = None
    if settings.batch_dir is not None:
        max_in_work = IN_WORK_FOR_EACH_SLOT * num_slots
        jobs = batch_jobs(Path(settings.batch_dir), PoolAnswerer(pool), max_in_work, observer)
    app.state.batch_jobs = jobs
    return app


def _add(app: FastAPI, route: APIRoute) -> None:
    """Add an endpoint of models. What is asked for by an id was kept, whichever model made it, and is found here."""
    is_kept = bool(route.param_convertors)
    app.router.add_api_route(
        route.path,
        route.endpoint,
        methods=route.methods,
        include_in_schema=route.include_in_schema,
        route_class_override=type(route) if is_kept else ModelRoute,
    )
