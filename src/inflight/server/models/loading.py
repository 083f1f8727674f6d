"""`ServedModel`: a loaded model with its applications. `ModelLoad` loads and unloads it.

State that outlives a load is kept here: facts about the model, and its crash count.

How much memory a model takes: an estimate before it is loaded, a measurement after.

An engine's memory is weights, KV cache and a constant (docs/guides/memory.md). A cache counts at its limit. A draft
model does not count.
"""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from starlette.types import ASGIApp

from inflight.contracts.api.config import CACHE_SHARE_OF_HOST, EngineConfig
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.step.record import EngineStats
from inflight.entrypoints.async_llm import AsyncLLM
from inflight.gguf.find import parts_of
from inflight.host.machine import usable_memory
from inflight.server.app import background_app, create_app
from inflight.server.live.endpoint import add_live_page
from inflight.server.live.view import LiveView
from inflight.server.responses.store import ResponseStore
from inflight.server.serving.observer import Observers
from inflight.server.serving.service import Service
from inflight.server.serving.settings import ServerSettings

PEAK_OF_LOADING = 1.6
"""The peak during a load, as a multiple of the weights."""

BYTES_OF_PROCESS = 2**29
"""Torch, Python and kernels."""

WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "*.pt")
"""File patterns of weights in a folder; the first match counts."""


def cache_limit(config: EngineConfig, num_engines: int) -> int | None:
    """The memory of one engine's cache in bytes. Unless an option sets it, engines that may run at once share what a
    single one would take. None: it is given in blocks, whose size only the engine knows."""
    if config.kv_cache.memory is not None or config.kv_cache.num_blocks is not None:
        return config.kv_cache.memory
    return int(usable_memory() * CACHE_SHARE_OF_HOST / num_engines)


def bytes_before_load(model: str | os.PathLike[str], cache_bytes: int, num_engines: int = 1) -> int:
    """Estimate a model's peak memory during its load, and afterwards.

    Args:
        cache_bytes: the limit of one engine's cache.
    """
    return int(PEAK_OF_LOADING * weight_bytes(model)) + num_engines * (cache_bytes + BYTES_OF_PROCESS)


def bytes_when_loaded(info: ModelInfo, num_engines: int = 1) -> int:
    """The most memory of a loaded model."""
    num_blocks = info.num_blocks // max(1, len(info.cache_groups))
    cache_bytes = num_blocks * info.block_size * info.kv_bytes_per_token
    return sum(each.num_bytes for each in info.weights) + num_engines * (cache_bytes + BYTES_OF_PROCESS)


def weight_bytes(model: str | os.PathLike[str]) -> int:
    """The size of a model's weights in its folder or file; 0 if it is elsewhere."""
    path = Path(os.path.expanduser(model))
    if path.is_file():
        parts = [path.with_name(name) for name in parts_of(path.name)]
        return sum(part.stat().st_size for part in parts if part.is_file())
    if not path.is_dir():
        return 0
    for pattern in WEIGHTS:
        if files := list(path.glob(pattern)):
            return sum(file.stat().st_size for file in files)
    return 0


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
