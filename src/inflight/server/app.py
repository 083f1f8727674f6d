"""`create_app`: assembles the HTTP application, which starts and stops the engine with itself. Decides nothing else.

The requests of batch jobs are answered by a second application of the same endpoints, without a socket, whose requests
all run in the background, take as long as they take, and are no part of what operators see of their clients.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from fastapi import FastAPI

from inflight import __version__
from inflight.async_llm import AsyncLLM
from inflight.batches.worker import Answerer
from inflight.server.anthropic import endpoint as anthropic_messages
from inflight.server.anthropic import errors as anthropic_errors
from inflight.server.batches import batches_endpoint, files_endpoint
from inflight.server.batches.answering import AppAnswerer
from inflight.server.batches.jobs import BatchJobs
from inflight.server.openai import adapters, chat, completions, tokenization
from inflight.server.pooling import embeddings, labels, scores
from inflight.server.responses import endpoint as responses
from inflight.server.responses.store import ResponseStore
from inflight.server.serving import status
from inflight.server.serving.observer import RequestObserver
from inflight.server.serving.readiness import keep_running
from inflight.server.serving.service import Service
from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import add_error_handlers

logger = logging.getLogger("inflight.server")

ENDPOINTS = (completions, chat, responses, embeddings)
"""Those that lines of batch files may name, and more."""

OF_A_MODEL = (*ENDPOINTS, anthropic_messages, tokenization, scores, labels)
"""Those that a model answers."""

OF_FILES = (files_endpoint, batches_endpoint)

IN_WORK_FOR_EACH_SLOT = 2
"""So that another request waits when one of a batch job gives its slot back."""


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
        on_loss: called when the engine is lost: it has died too often, or its model cannot be loaded any more. Every
            request is an error from then on.

    Raises:
        ValueError: the folder for batch jobs cannot be used, or another process has it.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        logger.info("loading %s", settings.model_name)
        if llm.tokenizer is not None:
            llm.tokenizer.encode("warm")  # its first call sets things up, which two threads must not do at once
        keeper = asyncio.create_task(keep_running(llm, on_loss))
        if jobs is not None:
            jobs.start()
        try:
            yield
        finally:
            keeper.cancel()
            if jobs is not None:
                await jobs.stop()
            await llm.stop()

    app = FastAPI(title="inflight", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    _add_endpoints(app, Service(llm, settings, observer, int(time.time())), *OF_A_MODEL, adapters, *OF_FILES, status)
    jobs = None if settings.batch_dir is None else _batch_jobs(llm, settings, Path(settings.batch_dir), observer)
    app.state.batch_jobs = jobs
    return app


def background_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """Return the application that answers requests of batch jobs."""
    background = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    service = Service(llm, replace(settings, request_timeout=None), None, int(time.time()), in_background=True)
    _add_endpoints(background, service, *ENDPOINTS)
    return background


def _batch_jobs(llm: AsyncLLM, settings: ServerSettings, folder: Path, observer: RequestObserver | None) -> BatchJobs:
    max_in_work = IN_WORK_FOR_EACH_SLOT * llm.config.max_num_seqs * llm.num_replicas
    return batch_jobs(folder, AppAnswerer(background_app(llm, settings), llm), max_in_work, observer)


def batch_jobs(folder: Path, answerer: Answerer, max_in_work: int, observer: RequestObserver | None) -> BatchJobs:
    """Return the jobs in a folder. Raises `ValueError` if it cannot be used, or another process has it."""
    try:
        return BatchJobs(folder, answerer, max_in_work, (observer or RequestObserver()).saw_batch)
    except OSError as error:
        raise ValueError(f"the folder for batch jobs cannot be used: {error}") from error


def _add_endpoints(app: FastAPI, service: Service, *modules: ModuleType) -> None:
    app.state.service, app.state.settings = service, service.settings
    app.state.is_strict = service.settings.strict
    app.state.responses = ResponseStore()
    for module in modules:
        app.include_router(module.router)
    add_error_handlers(app, {anthropic_errors.PATH: anthropic_errors.answer})
