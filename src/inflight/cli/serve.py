"""`inflight serve`: the HTTP server in the foreground, until it is interrupted."""

import asyncio
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inflight.cli.options import engine_options, engine_values, quiet_libraries
from inflight.errors import EngineDeadError

if TYPE_CHECKING:
    import uvicorn

    from inflight.async_llm import AsyncLLM

BACKLOG = 2048
"""Connections that may wait to be accepted: a thousand clients come at once."""


@click.command()
@click.argument("model", required=False)
@click.option("--host", default="127.0.0.1", help="The address to listen on; 0.0.0.0 is every one of this machine.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0 takes a free one.")
@click.option(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    help="What clients call the model; repeated: further names that are accepted.",
)
@click.option("--max-n", type=int, help="Most sequences that a request may ask for with each prompt.")
@click.option("--max-num-sequences", type=int, help="Most sequences of one request: prompts times sequences of each.")
@click.option("--max-logprobs", type=int, help="Most alternatives to a token that a request may ask for.")
@click.option("--request-timeout", type=float, help="Seconds after which a request is aborted.")
@click.option("--keep-alive-interval", type=float, help="Seconds of silence after which a stream is sent a comment.")
@click.option("--max-stall", type=float, help="Seconds that a stream waits for a client that does not read.")
@click.option(
    "--trust-request-chat-template", is_flag=True, default=None, help="Let requests bring their own chat template."
)
@engine_options
def serve(model: str | None, host: str, port: int, served_model_names: tuple[str, ...], **options: Any) -> None:
    """Serve MODEL (a hub id or a folder; without it, the small embedded one) over HTTP, as OpenAI does."""
    quiet_libraries()
    import uvicorn

    from inflight.async_llm import AsyncLLM
    from inflight.server.app import create_app
    from inflight.server.settings import ServerSettings

    name, *aliases = _names(model, served_model_names)
    engine = engine_values(options)
    given = {key: value for key, value in options.items() if key not in engine and value is not None}
    settings = ServerSettings(model_name=name, model_aliases=tuple(aliases), **given)
    llm = AsyncLLM(model, **engine)
    listener = _listener(host, port, settings.max_stall)
    config = uvicorn.Config(
        create_app(llm, settings), http="httptools", access_log=False, log_config=None, server_header=False
    )
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_run(uvicorn.Server(config), llm, listener, f"inflight: {name} is served at {address}"))


async def _run(server: "uvicorn.Server", llm: "AsyncLLM", listener: socket.socket, greeting: str) -> None:
    """Serve until the server is told to end; say so when the engine is loaded, end if it can not be."""
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await llm.start()
        click.echo(greeting)
    except (ValueError, EngineDeadError) as error:
        if not server.should_exit:  # it was not interrupted while loading
            server.should_exit = True
            await serving
            raise click.ClickException(str(error)) from error
    await serving


def _names(model: str | None, served: tuple[str, ...]) -> list[str]:
    """What the model is called, and what else it may be: its own name is always one of them."""
    from inflight.server.settings import DEMO_MODEL_NAME

    own = [DEMO_MODEL_NAME] if model is None else [model]
    if model is not None and Path(model).expanduser().is_dir():
        own.insert(0, Path(model).expanduser().resolve().name)
    return list(dict.fromkeys([*served, *own]))


def _listener(host: str, port: int, max_stall: float) -> socket.socket:
    """A socket that listens. A connection whose client takes nothing for `max_stall` seconds is cut by the system,
    with whatever was still to be sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise click.ClickException(f"can not listen on {host}, port {port}: {error.strerror or error}") from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * max_stall))
    return listener
