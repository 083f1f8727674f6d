"""`serve_until_told`: runs the whole server in the foreground: application, operations around it, socket and engine.

Decides in which order they start and stop. Knows no endpoint and no command-line option.
"""

import asyncio
import gc
import logging
import socket
from collections.abc import Callable

import uvicorn

from inflight.async_llm import AsyncLLM
from inflight.contracts.errors import EngineDeadError, ModelError
from inflight.contracts.record import RecordTo
from inflight.garbage_collection import spare_what_stays
from inflight.server.app import create_app
from inflight.server.live.endpoint import add_live_page
from inflight.server.live.view import LiveView
from inflight.server.operations.heads import limited_to
from inflight.server.operations.lifecycle import Drain, DrainingServer
from inflight.server.operations.model_reload import ModelReload
from inflight.server.operations.open_files import allow_many_open_files
from inflight.server.operations.settings import OperatorSettings
from inflight.server.operations.stack import Operations
from inflight.server.serving.settings import ServerSettings

logger = logging.getLogger("inflight.server")


def serve_until_told(
    llm: AsyncLLM,
    settings: ServerSettings,
    operator_settings: OperatorSettings,
    listener: socket.socket,
    tell_ready: Callable[[], None],
    environment_keys: str | None = None,
    record_to: RecordTo | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. SIGHUP reads API keys anew, SIGUSR1 loads the model anew.

    Args:
        listener: a listening socket; see `operations.listener`.
        tell_ready: called when the engine is loaded. Requests are accepted before that, and wait.
        environment_keys: more API keys, separated by commas.
        record_to: where `llm` records its steps, for the live page.

    Raises:
        ModelError: the model cannot be loaded, or could not be loaded again.
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
        operations.metrics.describe_adapters(llm.config.max_num_seqs * llm.num_replicas)
    app = create_app(llm, settings, operations, end)
    if view is not None:
        add_live_page(app, view)
    app.add_api_route("/metrics", operations.metrics.endpoint, summary="Metrics for Prometheus.")
    app.add_api_route("/metrics", operations.metrics.endpoint, methods=["HEAD"], include_in_schema=False)
    config = uvicorn.Config(
        operations.surround(app),
        http=limited_to(allow_many_open_files()),
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
    )
    model_reload = ModelReload(llm)
    on_signals = {"SIGHUP": operations.reload, "SIGUSR1": model_reload.begin}
    server = DrainingServer(config, operations.drain, on_signals)
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        try:
            runner.run(_serve(server, operations.drain, llm, listener, is_ready))
        finally:
            runner.run(operations.close())
            if view is not None:
                view.close()
    if losses:
        raise losses[0]


async def _serve(
    server: DrainingServer, drain: Drain, llm: AsyncLLM, listener: socket.socket, tell_ready: Callable[[], None]
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await llm.start()
        gc.collect()
        spare_what_stays()
        tell_ready()
    except (ModelError, EngineDeadError):
        if not drain.is_draining:  # otherwise it was told to stop while loading
            server.should_exit = True
            await serving
            raise
    await serving
