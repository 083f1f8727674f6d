"""`create_app`: assembles the HTTP application, which starts and stops the engine.

A second application of the same endpoints, without a socket, answers batch jobs. Its requests run in the background,
without a timeout, and do not appear in metrics and logs of clients.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

from fastapi import FastAPI

from inflight import __version__
from inflight.batches.worker import Answerer
from inflight.contracts.api.errors import EngineDeadError, EngineGivenUpError, ModelError
from inflight.entrypoints.async_llm import AsyncLLM
from inflight.server.batches.answering import AppAnswerer
from inflight.server.batches.jobs import BatchJobs
from inflight.server.endpoints import BATCH_LINES, Endpoint, add_endpoints, errors_of_path
from inflight.server.responses.store import ResponseStore
from inflight.server.serving.observer import RequestObserver
from inflight.server.serving.service import Service
from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import add_error_handlers
from inflight.server.wire.json_route import JsonRoute

logger = logging.getLogger("inflight.server")

SECONDS_BETWEEN_LOOKS = 0.5

IN_WORK_FOR_EACH_SLOT = 2
"""Batch requests queued beyond the slots, so that a freed slot is filled at once."""


def create_app(
    llm: AsyncLLM,
    settings: ServerSettings,
    observer: RequestObserver | None = None,
    on_loss: Callable[[Exception], None] = lambda _: None,
) -> FastAPI:
    """Return an ASGI application that serves `llm`.

    It accepts requests as soon as it starts; requests that arrive while the engine is loading wait for it.

    Args:
        observer: notified of every request that runs.
        on_loss: called when the engine is lost: it has died too often, or its model can no longer be loaded. From then
            on every request fails.

    Raises:
        ValueError: the store of responses or the folder for batch jobs cannot be used, or another process has it.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        logger.info("loading %s", settings.model_name)
        if llm.tokenizer is not None:
            llm.tokenizer.encode(
                "warm"
            )  # its first call initialises state, which must not happen in two threads at once
        keeper = asyncio.create_task(_keep_running(llm, on_loss))
        if jobs is not None:
            jobs.start()
        try:
            yield
        finally:
            keeper.cancel()
            if jobs is not None:
                await jobs.stop()
            await llm.stop()
            store.close()

    app = FastAPI(title="inflight", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    store = ResponseStore(settings.response_store, settings.response_store_size)
    _set_up(app, Service(llm, settings, observer, int(time.time())), lambda _: True, store)
    jobs = None if settings.batch_dir is None else _batch_jobs(llm, settings, Path(settings.batch_dir), observer)
    app.state.batch_jobs = jobs
    return app


def background_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """Return the application that answers requests of batch jobs."""
    background = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    service = Service(llm, replace(settings, request_timeout=None), None, int(time.time()), in_background=True)
    _set_up(background, service, lambda endpoint: endpoint.is_batch_line, ResponseStore())
    return background


def _batch_jobs(llm: AsyncLLM, settings: ServerSettings, folder: Path, observer: RequestObserver | None) -> BatchJobs:
    max_in_work = IN_WORK_FOR_EACH_SLOT * llm.config.scheduling.max_num_seqs * llm.num_replicas
    return batch_jobs(folder, AppAnswerer(background_app(llm, settings), llm), max_in_work, observer)


def batch_jobs(folder: Path, answerer: Answerer, max_in_work: int, observer: RequestObserver | None) -> BatchJobs:
    """Return the jobs in a folder. Raises `ValueError` if it cannot be used, or another process has it."""
    try:
        return BatchJobs(folder, answerer, max_in_work, (observer or RequestObserver()).batch_changed, BATCH_LINES)
    except OSError as error:
        raise ValueError(f"the folder for batch jobs cannot be used: {error}") from error


def _set_up(app: FastAPI, service: Service, has: Callable[[Endpoint], bool], store: ResponseStore) -> None:
    app.state.service = app.state.catalog = service
    app.state.settings, app.state.is_strict = service.settings, service.settings.strict
    app.state.addresses = service.settings.addresses
    app.state.responses = store
    add_endpoints(app, lambda endpoint: JsonRoute if has(endpoint) else None)
    add_error_handlers(app, errors_of_path)


async def _keep_running(llm: AsyncLLM, on_loss: Callable[[Exception], None]) -> None:
    """Start the engine, and restart it after crashes, until cancelled, or until it cannot be started.

    Args:
        on_loss: called then, with the reason.
    """
    while True:
        try:
            await llm.start()
        except (EngineGivenUpError, ModelError) as error:
            on_loss(error)
            return
        except EngineDeadError:
            pass  # requests and /health report it; the next start waits for its delay
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
