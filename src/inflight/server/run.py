"""`serve_until_told`: runs the whole server in the foreground: application, operations, socket and engine.
`serve_models_until_told`: the same for several models, loaded on demand.

Decides the order of starts and stops. Knows no endpoint and no command-line option.

`listen`: the server's socket, opened before anything is loaded, so that an address in use is noticed at once.
"""

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from inflight.contracts.api.errors import EngineDeadError, ModelError
from inflight.contracts.step.record import RecordTo
from inflight.entrypoints.async_llm import AsyncLLM
from inflight.host.garbage_collection import freeze_loaded_objects
from inflight.server.app import create_app
from inflight.server.live.endpoint import add_live_page
from inflight.server.live.view import LiveView
from inflight.server.models.loading import LivePage
from inflight.server.models.pool import PoolSettings
from inflight.server.models.served import ServedModels
from inflight.server.operations.connections import allow_many_open_files, limited_to
from inflight.server.operations.lifecycle import Drain, DrainingServer, ModelReload
from inflight.server.operations.settings import OperatorSettings
from inflight.server.operations.stack import Operations, OperationsStack
from inflight.server.serving.settings import ServerSettings

logger = logging.getLogger("inflight.server")


def serve_until_told(
    llm: AsyncLLM,
    settings: ServerSettings,
    operator_settings: OperatorSettings,
    listeners: Sequence[socket.socket],
    tell_ready: Callable[[], None],
    environment_keys: str | None = None,
    record_to: RecordTo | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. SIGHUP rereads the API keys, SIGUSR1 reloads the model.

    Args:
        listeners: listening sockets; a Unix one is removed in the end.
        tell_ready: called when the engine is loaded. Earlier requests are accepted and wait.
        environment_keys: more API keys, separated by commas.
        record_to: where `llm` records its steps, for the live page.

    Raises:
        ModelError: the model cannot be loaded or reloaded.
        EngineDeadError: the engine died while it was being loaded, or too often. (The server drains first.)
        ValueError: see `Operations`.
    """

    async def abort_all() -> None:
        await app.state.service.abort_all()

    losses: list[Exception] = []

    def is_ready() -> None:
        operations.metrics.engines.describe_cache(llm.model_info, llm.num_replicas)
        tell_ready()

    def end(error: Exception) -> None:
        if not operations.drain.is_draining:
            logger.error("this server ends: %s", error)
            losses.append(error)
            operations.drain.begin()

    view: LiveView | None = None
    if operator_settings.ui:
        view = LiveView(llm, record_to, lambda: operations.drain.is_draining, shows_texts=operator_settings.log_text)
    operations = Operations(
        operator_settings,
        settings.model_name,
        llm.replica_stats,
        abort_all,
        environment_keys,
        lambda: llm.num_crashes,
        [] if view is None else [view.history],
    )
    if llm.config.adapters is not None:
        operations.metrics.describe_adapters(llm.config.scheduling.max_num_seqs * llm.num_replicas)
    app = create_app(llm, settings, operations, end)
    if view is not None:
        add_live_page(app, view)
    app.state.metrics = operations.metrics.endpoint

    async def start() -> None:
        await llm.start()
        gc.collect()
        freeze_loaded_objects()
        is_ready()

    try:
        _run(app, operations, ModelReload(llm), listeners, start)
    finally:
        if view is not None:
            view.close()
    if losses:
        raise losses[0]


def serve_models_until_told(
    models: PoolSettings,
    options: Mapping[str, Any],
    settings: ServerSettings,
    operator_settings: OperatorSettings,
    listeners: Sequence[socket.socket],
    tell_ready: Callable[[], None],
    environment_keys: str | None = None,
) -> None:
    """Serve several models until SIGTERM or SIGINT, each loaded on first use. SIGHUP rereads the API keys, SIGUSR1
    reloads the loaded models.

    Args:
        options: those of each engine, as `AsyncLLM` takes them.
        listeners, tell_ready, environment_keys: see `serve_until_told`.

    Raises:
        ValueError: an option is wrong, or see `OperationsStack`.
    """
    page = None
    if operator_settings.ui:
        page = LivePage(lambda: surroundings.drain.is_draining, operator_settings.log_text)
    served = ServedModels(models, options, settings, page)
    surroundings = OperationsStack(operator_settings, served.metrics, served.abort_all, environment_keys)
    for name, observers in served.observers.items():
        observers += [surroundings.access_log, *surroundings.traces(name)]
    app = served.make_app()
    app.state.metrics = served.metrics.endpoint

    async def start() -> None:
        tell_ready()

    _run(app, surroundings, ModelReload(served), listeners, start)


def _run(
    app: FastAPI,
    surroundings: OperationsStack,
    model_reload: ModelReload,
    listeners: Sequence[socket.socket],
    start: Callable[[], Awaitable[None]],
) -> None:
    config = uvicorn.Config(
        surroundings.surround(app),
        http=limited_to(allow_many_open_files()),
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=surroundings.timeout_keep_alive,
    )
    on_signals = {"SIGHUP": surroundings.reload, "SIGUSR1": model_reload.begin}
    server = DrainingServer(config, surroundings.drain, on_signals)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        try:
            with removing_sockets(listeners):
                runner.run(_serve(server, surroundings.drain, listeners, start))
        finally:
            runner.run(surroundings.close())


@contextlib.contextmanager
def removing_sockets(listeners: Sequence[socket.socket]) -> Iterator[None]:
    """Remove Unix sockets in the end, but none that another server has bound since."""
    paths = [Path(each.getsockname()) for each in listeners if each.family == socket.AF_UNIX]
    bound = {path: _identity(path) for path in paths}
    try:
        yield
    finally:
        for path, identity in bound.items():
            with contextlib.suppress(FileNotFoundError):
                if _identity(path) == identity:
                    path.unlink()


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_mtime_ns  # an inode may be reused


async def _serve(
    server: DrainingServer, drain: Drain, listeners: Sequence[socket.socket], start: Callable[[], Awaitable[None]]
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[*listeners]))
    try:
        await start()
    except (ModelError, EngineDeadError):
        if not drain.is_draining:  # otherwise it was told to stop while loading
            server.should_exit = True
            await serving
            raise
    await serving
