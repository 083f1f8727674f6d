"""`inflight serve`: runs the HTTP server in the foreground."""

import errno
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from inflight.cli.configurable import ConfigurableCommand
from inflight.cli.models import OF_A_TABLE, models_argument, named, pool_settings
from inflight.cli.options import (
    adapters_option,
    engine_options,
    engine_values,
    quiet_libraries,
    replicas_option,
    size,
    tensor_parallel_option,
    values_for,
)
from inflight.contracts.api.config import ROUTINGS
from inflight.contracts.api.errors import EngineDeadError, InvalidRequestError
from inflight.server.chat_format.families import CALL_FORMATS
from inflight.server.operations.settings import KEYS_VARIABLE, OperatorSettings
from inflight.server.serving.settings import ServerSettings
from inflight.text.processor_files import has_processor

if TYPE_CHECKING:
    from inflight.contracts.step.record import RecordTo
    from inflight.server.models.pool import PoolSettings


BACKLOG = 2048
"""Connections that may wait to be accepted; large enough for a thousand clients that connect at once."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens: on a port of these hosts, or on a Unix socket."""

    hosts: tuple[str, ...]
    port: int
    path: str | None = None

    def urls(self, listeners: Sequence[socket.socket]) -> list[str]:
        """The addresses for clients."""
        if self.path is not None:
            return [f"unix:{self.path}"]
        port = listeners[0].getsockname()[1]
        return [f"http://{f'[{host}]' if ':' in host else host}:{port}" for host in self.hosts]


def limits(text: str) -> dict[str, int]:
    """Most items of a prompt: {"image": 4, "audio": 1}, or image=4,audio=1. Raises `click.BadParameter`."""
    try:
        if text.lstrip().startswith("{"):
            return dict(json.loads(text))
        return {name.strip(): int(number) for name, _, number in (each.partition("=") for each in text.split(","))}
    except ValueError:
        raise click.BadParameter(f'{text!r} is no limit; give JSON such as {{"image": 4}}, or image=4') from None


@click.command(cls=ConfigurableCommand, settings=(ServerSettings, OperatorSettings), tables={"models": OF_A_TABLE})
@click.option(
    "--host",
    multiple=True,
    default=["127.0.0.1"],
    help="The address to listen on; 0.0.0.0: all of this machine's. May be repeated.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0: any free port.")
@click.option("--uds", type=click.Path(), help="A Unix socket to listen on instead of --host and --port.")
@click.option("--root-path", help="The path under which a proxy serves it, such as /llm, which the proxy may strip.")
@click.option(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    help="The model's name for clients; repeat for further accepted names; *: any name.",
)
@click.option("--max-n", type=int, help="Most sequences that a request may ask for per prompt.")
@click.option("--max-num-sequences", type=int, help="Most sequences of one request: prompts times sequences each.")
@click.option("--max-logprobs", type=int, help="Most alternatives per token that a request may ask for.")
@click.option("--limit-mm-per-prompt", type=limits, help="Most items of a prompt, as image=4,audio=1, or JSON.")
@click.option("--allowed-media-domains", multiple=True, help="Fetch images and sounds from this host; repeatable.")
@click.option("--allowed-local-media-path", type=click.Path(), help="A folder of images and sounds for file URLs.")
@click.option("--request-timeout", type=float, help="Seconds after which a request is aborted.")
@click.option("--routing", type=click.Choice(ROUTINGS), help=f"Which replica gets a request.  [default: {ROUTINGS[0]}]")
@click.option("--step-timeout", type=float, help="Seconds of an engine's silence after which it is killed.")
@click.option("--keep-alive-interval", type=float, help="Seconds of silence before a keep-alive comment on a stream.")
@click.option("--max-stall", type=float, help="Seconds that a stream waits for a client that does not read.")
@click.option("--strict", is_flag=True, default=None, help="Refuse request fields that could be ignored or replaced.")
@click.option(
    "--trust-request-chat-template", is_flag=True, default=None, help="Allow requests to have their own chat template."
)
@click.option(
    "--tool-call-parser",
    type=click.Choice(list(CALL_FORMATS)),
    help="The model's notation of tool calls, if its chat template does not show it.",
)
@click.option("--batch-dir", type=click.Path(), help="A folder for files and batch jobs; without it they are disabled.")
@click.option("--max-file-size", type=size, help="Most bytes of an uploaded file, such as 4GiB.")
@click.option("--response-store", type=click.Path(), help="A file that keeps stored responses and conversations.")
@click.option("--response-store-size", type=size, help="Most bytes of them, such as 1GiB; the oldest are dropped.")
@click.option("--record", type=click.Path(), help="Record every step in this file, prompts only as hashes.")
@click.option("--record-size", type=size, default="64M", help="The size after which the next file of records begins.")
@click.option("--record-files", type=click.IntRange(min=1), default=4, help="How many of them are kept.")
@click.option(
    "--kv-events-config",
    help='Publish events of the prefix cache, as vLLM does: JSON such as \'{"endpoint": "tcp://*:5557"}\'.',
)
@click.option("--api-key-file", type=click.Path(), help=f"API keys, one per line (besides those in {KEYS_VARIABLE}).")
@click.option("--max-body-size", type=size, help="Most bytes of a request's body, such as 4MiB.")
@click.option("--max-requests", type=int, help="Most HTTP requests served at once; more are refused.")
@click.option("--timeout-keep-alive", type=int, help="Seconds after which an idle connection is closed.")
@click.option("--grace-period", type=float, help="Seconds that running requests have to finish after SIGTERM.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="For people, or one JSON object per line.")
@click.option("--ui/--no-ui", default=None, help="Whether / answers with the live page.")
@click.option("--log-text", is_flag=True, default=None, help="Log prompts and answers, too.")
@click.option(
    "--cors-origin", "cors_origins", multiple=True, help="Allow calls from web pages of this origin; may be repeated."
)
@click.option("--traces-endpoint", help="An OpenTelemetry collector's URL for traces (OTLP over HTTP).")
@models_argument
@adapters_option
@click.option(
    "--allow-adapter-loading", is_flag=True, default=None, help="Let clients with a key load and unload adapters."
)
@replicas_option
@tensor_parallel_option
@engine_options
def serve(
    models: tuple[str, ...],
    host: tuple[str, ...],
    port: int,
    uds: str | None,
    served_model_names: tuple[str, ...],
    **options: Any,
) -> None:
    """Serve a model over HTTP, with OpenAI's API. MODEL means the same as --model MODEL; several models are loaded on
    demand, and may be given as NAME=MODEL."""
    source = click.get_current_context().get_parameter_source
    for other in ("host", "port"):
        if uds is not None and source(other) is not ParameterSource.DEFAULT:
            raise click.UsageError(
                f"--uds {uds} and --{other} are given; a server listens on a socket's path or on ports"
            )
    address = Address(host, port, uds)
    pool = pool_settings(models, {**options, "served_model_names": served_model_names})
    if pool is not None:
        serve_models(pool, address, options)
        return
    name, model = named(models[0]) if models else (None, None)
    serve_model(model, address, served_model_names if name is None else (name, *served_model_names), options)


def serve_model(
    model: str | None,
    address: Address,
    served_model_names: tuple[str, ...],
    options: dict[str, Any],
    when_ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Run the server until a signal.

    Args:
        options: the command's other parameters.
        when_ready: called with the server's address when the model is loaded.
    """
    _prepare_libraries(options, [model])
    from inflight.contracts.api.watching import KVEvents
    from inflight.entrypoints.async_llm import AsyncLLM
    from inflight.server.serving.settings import ServerSettings, names_of

    name, *aliases = names_of(model, served_model_names)
    settings = ServerSettings(model_name=name, model_aliases=tuple(aliases), **values_for(ServerSettings, options))
    operator_settings = _operator_settings(options)
    engine = _async_llm_options(options)
    for adapter in engine.get("adapters", {}):
        if adapter in (name, *aliases):
            raise click.UsageError(f"the adapter {adapter!r} has a name of the model; give it another")
    if settings.allow_adapter_loading:
        if operator_settings.api_key_file is None and KEYS_VARIABLE not in os.environ:
            raise click.UsageError(f"--allow-adapter-loading needs API keys: --api-key-file, or {KEYS_VARIABLE}")
        engine.setdefault("adapters", {})
    listeners = _listeners(address, settings.max_stall)  # first, because the address may be in use
    record_to = _record_to(options["record"], options["record_size"], options["record_files"])
    llm = AsyncLLM(
        model,
        starts_at_once=True,
        record_to=record_to,
        kv_events=None if options["kv_events_config"] is None else KVEvents.parse(options["kv_events_config"]),
        **engine,
    )
    from inflight.server.run import serve_until_told

    if llm.tokenizer is None:
        logging.getLogger("inflight.server").warning("%s has no tokenizer: it takes and returns token ids only", name)
    urls = address.urls(listeners)

    def tell_ready() -> None:
        _say(operator_settings, f"{name} is served at {' and '.join(urls)}")
        when_ready(urls[0])

    try:
        serve_until_told(
            llm, settings, operator_settings, listeners, tell_ready, os.environ.get(KEYS_VARIABLE), record_to
        )
    except EngineDeadError as error:
        raise click.ClickException(str(error)) from error


def serve_models(models: "PoolSettings", address: Address, options: dict[str, Any]) -> None:
    """Run a server of several models until a signal.

    Args:
        options: the command's other parameters.
    """
    tokenizers = (own.get("tokenizer") for own in models.own_options.values())
    _prepare_libraries(options, [*models.models.values(), *tokenizers])
    from inflight.server.run import serve_models_until_told
    from inflight.server.serving.settings import ServerSettings

    settings = ServerSettings(**values_for(ServerSettings, options))
    operator_settings = _operator_settings(options)
    listeners = _listeners(address, settings.max_stall)
    ready = f"{', '.join(models.models)} {'are' if len(models.models) > 1 else 'is'} served at "
    serve_models_until_told(
        models,
        _async_llm_options(options),
        settings,
        operator_settings,
        listeners,
        lambda: _say(operator_settings, ready + " and ".join(address.urls(listeners))),
        os.environ.get(KEYS_VARIABLE),
    )


def _prepare_libraries(options: dict[str, Any], models: Iterable[str | None]) -> None:
    quiet_libraries()
    sources = [*models, options.get("tokenizer")]
    if options["trust_remote_code"] or any(has_processor(each, options["revision"]) for each in sources if each):
        return  # the tokenizer or the processor may need it
    _do_without_torch()


def _operator_settings(options: dict[str, Any]) -> OperatorSettings:
    from inflight.server.operations.logs import set_up_logging

    settings = OperatorSettings(**values_for(OperatorSettings, options))
    set_up_logging(as_json=settings.log_format == "json")
    return settings


def listen(host: str, port: int, max_stall: float) -> socket.socket:
    """Open the server's socket, before anything is loaded, so that an address in use is noticed at once.

    Args:
        max_stall: seconds after which the operating system, where it supports this, closes a connection whose client
            accepts no data, and drops what was still to be sent.

    Raises:
        OSError: the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    takes_both = host == "::" and socket.has_dualstack_ipv6()  # all addresses, IPv4's among them
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=takes_both)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * max_stall))
    return listener


def listen_at(path: str) -> socket.socket:
    """Open a Unix socket; one that a dead server has left behind is replaced. Raises `OSError`."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(1.0)  # a busy server may not accept
                if client.connect_ex(path) == errno.ECONNREFUSED:
                    Path(path).unlink()
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _listeners(address: Address, max_stall: float) -> list[socket.socket]:
    where, listeners = address.path, list[socket.socket]()
    try:
        if address.path is not None:
            return [listen_at(address.path)]
        for host in address.hosts:
            port = listeners[0].getsockname()[1] if listeners else address.port  # the same, also if any is wanted
            where = f"{host}, port {port}"
            listeners.append(listen(host, port, max_stall))
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while attempting")[0]  # asyncio adds the address
        raise click.ClickException(f"cannot listen on {where}: {reason}") from error
    return listeners


def _say(settings: OperatorSettings, ready: str) -> None:
    if settings.log_format == "json":
        logging.getLogger("inflight.server").info("%s", ready)
    else:
        click.echo(f"inflight: {ready}")


def _async_llm_options(options: dict[str, Any]) -> dict[str, Any]:
    return {**engine_values(options), **_given(options, "routing", "step_timeout")}


def _do_without_torch() -> None:
    """Keep torch out of this process, which uses only tokenizers and configurations: `transformers` imports it if
    installed, which takes a second and 250 MB. The engine's process has it, and processors of images need it."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # so that it is not found


def _record_to(path: str | None, max_bytes: int, num_files: int) -> "RecordTo | None":
    """The recording options of the engine's process. Raises `InvalidRequestError` if it is not writable."""
    if path is None:
        return None
    from inflight.contracts.step.record import RecordTo

    full = Path(path).expanduser().absolute()
    try:
        full.open("a").close()
    except OSError as error:
        raise InvalidRequestError(f"the recording {path!r} cannot be written: {error.strerror}") from error
    return RecordTo(path=str(full), max_bytes=max_bytes, num_files=num_files)


def _given(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names if options[name] is not None}
