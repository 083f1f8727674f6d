"""`create_app`: assembles the HTTP application, which starts and stops the engine with itself. Decides nothing else."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI

from inflight import __version__
from inflight.async_llm import AsyncLLM
from inflight.server.anthropic import endpoint as anthropic_messages
from inflight.server.anthropic import errors as anthropic_errors
from inflight.server.openai import chat, completions, tokenization
from inflight.server.responses import endpoint as responses
from inflight.server.responses.store import ResponseStore
from inflight.server.serving import status
from inflight.server.serving.observer import RequestObserver
from inflight.server.serving.readiness import keep_running
from inflight.server.serving.service import Service
from inflight.server.serving.settings import ServerSettings
from inflight.server.wire.api_errors import add_error_handlers


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
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if llm.tokenizer is not None:
            llm.tokenizer.encode("warm")  # its first call sets things up, which two threads must not do at once
        keeper = asyncio.create_task(keep_running(llm, on_loss))
        try:
            yield
        finally:
            keeper.cancel()
            await llm.stop()

    app = FastAPI(title="inflight", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = Service(llm, settings, observer, start_time=int(time.time()))
    app.state.refuses_unknown_fields = settings.strict_fields
    app.state.responses = ResponseStore()
    for module in (completions, chat, responses, anthropic_messages, tokenization, status):
        app.include_router(module.router)
    add_error_handlers(app, {anthropic_errors.PATH: anthropic_errors.answer})
    return app
