"""`ServedModel`: a loaded model with its applications. `ModelLoad` loads and unloads it.

State that outlives a load is kept here: facts about the model, and its crash count.
"""

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.types import ASGIApp

from inflight.contracts.model_info import ModelInfo
from inflight.contracts.record import EngineStats
from inflight.entrypoints.async_llm import AsyncLLM
from inflight.server.app import background_app, create_app
from inflight.server.live.endpoint import add_live_page
from inflight.server.live.view import LiveView
from inflight.server.models.memory import bytes_when_loaded
from inflight.server.responses.store import ResponseStore
from inflight.server.serving.observer import Observers
from inflight.server.serving.service import Service
from inflight.server.serving.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model.

    Attributes:
        app: answers clients.
        background: answers batch jobs.
        num_bytes: its memory.
    """

    llm: AsyncLLM
    service: Service
    app: ASGIApp
    background: ASGIApp
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LivePage:
    """The live page's settings.

    Attributes:
        is_ending: whether the server is about to end.
        shows_texts: whether every client with a key may see prompts and answers.
    """

    is_ending: Callable[[], bool]
    shows_texts: bool


class ModelLoad:
    """Loads one model, repeatedly; see `pool.ModelLoader`.

    Args:
        make: starts its engine; slow.
        settings: with its name.
        responses: the store of all models: a conversation may continue with another model.
        page: of the server; None: no live page.

    Attributes:
        info: facts from the last load; None: never loaded.
        observer: notified of its requests.
    """

    def __init__(
        self,
        make: Callable[[], AsyncLLM],
        settings: ServerSettings,
        responses: ResponseStore,
        page: LivePage | None = None,
    ) -> None:
        self.info: ModelInfo | None = None
        self.observer = Observers([])
        self._make, self._settings, self._responses, self._page = make, settings, responses, page
        self._llm: AsyncLLM | None = None
        self._num_earlier_crashes = 0

    @asynccontextmanager
    async def __call__(self, lose: Callable[[Exception], None]) -> AsyncIterator[ServedModel]:
        """See `pool.ModelLoader`."""
        llm = self._llm = await _made(self._make)
        is_loaded = False

        def on_loss(error: Exception) -> None:
            if is_loaded:
                lose(error)

        try:
            app = create_app(llm, self._settings, self.observer, on_loss)
            app.state.responses = self._responses
            async with app.router.lifespan_context(app), self._seen(llm, app):
                await llm.start()
                self.info, is_loaded = llm.model_info, True
                num_bytes = bytes_when_loaded(llm.model_info, llm.num_replicas)
                yield ServedModel(llm, app.state.service, app, background_app(llm, self._settings), num_bytes)
        finally:
            self._llm, self._num_earlier_crashes = None, self.num_crashes
            await llm.stop()
            # A tokenizer may be large, and is in the application's cycles: collect them once it is unreferenced.
            asyncio.get_running_loop().call_soon(gc.collect)

    @asynccontextmanager
    async def _seen(self, llm: AsyncLLM, app: FastAPI) -> AsyncIterator[None]:
        """Show a model on the live page until the block ends."""
        if self._page is None:
            yield
            return
        page, is_ending = self._page, False
        view = LiveView(llm, is_ending=lambda: is_ending or page.is_ending(), shows_texts=page.shows_texts)
        add_live_page(app, view)
        self.observer.observers.append(view.history)
        try:
            yield
        finally:
            is_ending = True
            self.observer.observers.remove(view.history)
            view.close()

    @property
    def is_running(self) -> bool:
        """Whether it has engines, loaded or loading."""
        return self._llm is not None

    @property
    def num_crashes(self) -> int:
        """Number of crashes of its engines."""
        return self._num_earlier_crashes + (0 if self._llm is None else self._llm.num_crashes)

    async def replica_stats(self, seconds: float | None = None) -> Mapping[int, EngineStats | None]:
        """As `AsyncLLM.replica_stats`; empty while not loaded."""
        return {} if self._llm is None else await self._llm.replica_stats(seconds)


async def _made(make: Callable[[], AsyncLLM]) -> AsyncLLM:
    """Start an engine outside the event loop; if cancelled, stop it again."""
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait({making})
        if making.exception() is None:
            await making.result().stop()
        raise
