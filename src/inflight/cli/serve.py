"""`inflight serve`: runs the HTTP server in the foreground until it is told to stop."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inflight.cli.configurable import ConfigurableCommand
from inflight.cli.options import (
    adapters_option,
    engine_options,
    engine_values,
    model_argument,
    quiet_libraries,
    rank_options,
    replicas_option,
    size,
    values_for,
)
from inflight.contracts.config import ROUTINGS
from inflight.contracts.errors import EngineDeadError, InvalidRequestError
from inflight.server.answers.call_format import CALL_FORMATS
from inflight.server.operations.api_keys import KEYS_VARIABLE
from inflight.server.operations.settings import OperatorSettings
from inflight.server.serving.settings import ServerSettings

if TYPE_CHECKING:
    from inflight.contracts.record import RecordTo


@click.command(cls=ConfigurableCommand, settings=(ServerSettings, OperatorSettings))
@click.option("--host", default="127.0.0.1", help="The address to listen on; 0.0.0.0: all of this machine's.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0: any free port.")
@click.option(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    help="The model's name for clients; repeat for further accepted names; *: any name.",
)
@click.option("--max-n", type=int, help="Most sequences that a request may ask for per prompt.")
@click.option("--max-num-sequences", type=int, help="Most sequences of one request: prompts times sequences each.")
@click.option("--max-logprobs", type=int, help="Most alternatives per token that a request may ask for.")
@click.option("--request-timeout", type=float, help="Seconds after which a request is aborted.")
@click.option("--routing", type=click.Choice(ROUTINGS), help=f"Which replica gets a request.  [default: {ROUTINGS[0]}]")
@click.option("--step-timeout", type=float, help="Seconds of an engine's silence after which it is killed.")
@click.option("--keep-alive-interval", type=float, help="Seconds of silence before a keep-alive comment on a stream.")
@click.option("--max-stall", type=float, help="Seconds that a stream waits for a client that does not read.")
@click.option(
    "--strict-fields", is_flag=True, default=None, help="Refuse request fields that could be ignored, too, by name."
)
@click.option(
    "--trust-request-chat-template", is_flag=True, default=None, help="Let requests bring their own chat template."
)
@click.option(
    "--tool-call-parser",
    type=click.Choice(list(CALL_FORMATS)),
    help="How the model writes tool calls, if its chat template does not show it.",
)
@click.option("--batch-dir", type=click.Path(), help="A folder for files and batch jobs; without it there are none.")
@click.option("--max-file-size", type=size, help="Most bytes of an uploaded file; units such as 4GiB are known.")
@click.option("--record", type=click.Path(), help="Record every step in this file, prompts only as hashes.")
@click.option("--record-size", type=size, default="64M", help="The size after which the next file of records begins.")
@click.option("--record-files", type=click.IntRange(min=1), default=4, help="How many of them are kept.")
@click.option(
    "--kv-events-config",
    help='Publish what the prefix cache holds, as vLLM does: JSON such as \'{"endpoint": "tcp://*:5557"}\'.',
)
@click.option("--api-key-file", type=click.Path(), help=f"API keys, one per line (besides those in {KEYS_VARIABLE}).")
@click.option("--max-body-size", type=size, help="Most bytes of a request's body; units such as 4MiB are known.")
@click.option("--max-requests", type=int, help="Most HTTP requests served at once; more are refused.")
@click.option("--grace-period", type=float, help="Seconds that running requests have to finish after SIGTERM.")
@click.option("--log-format", type=click.Choice(["text", "json"]), help="For people, or one JSON object per line.")
@click.option("--ui/--no-ui", default=None, help="Whether / answers with the live page.")
@click.option("--log-text", is_flag=True, default=None, help="Log prompts and answers, too.")
@click.option(
    "--cors-origin", "cors_origins", multiple=True, help="Allow calls from web pages of this origin; may be repeated."
)
@click.option("--traces-endpoint", help="An OpenTelemetry collector's URL for traces (OTLP over HTTP).")
@model_argument
@adapters_option
@click.option(
    "--allow-adapter-loading", is_flag=True, default=None, help="Let clients with a key load and unload adapters."
)
@replicas_option
@rank_options
@engine_options
def serve(model: str | None, host: str, port: int, served_model_names: tuple[str, ...], **options: Any) -> None:
    """Serve a model over HTTP, with OpenAI's API. MODEL means the same as --model MODEL."""
    serve_model(model, host, port, served_model_names, options)


def serve_model(
    model: str | None,
    host: str,
    port: int,
    served_model_names: tuple[str, ...],
    options: dict[str, Any],
    when_ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Run the server until it is told to stop.

    Args:
        options: the command's other parameters.
        when_ready: called with the server's address when the model is loaded.
    """
    quiet_libraries()
    if not options["trust_remote_code"]:  # a tokenizer of somebody else's may need it
        _do_without_torch()
    from inflight.async_llm import AsyncLLM
    from inflight.contracts.watching import KVEvents
    from inflight.server.operations.listener import listen
    from inflight.server.operations.logs import set_up_logging
    from inflight.server.operations.settings import OperatorSettings
    from inflight.server.serving.settings import ServerSettings, names_of

    name, *aliases = names_of(model, served_model_names)
    settings = ServerSettings(model_name=name, model_aliases=tuple(aliases), **values_for(ServerSettings, options))
    operator_settings = OperatorSettings(**values_for(OperatorSettings, options))
    engine = engine_values(options)
    for adapter in engine.get("adapters", {}):
        if adapter in (name, *aliases):
            raise click.UsageError(f"the adapter {adapter!r} has a name of the model; give it another")
    if settings.allow_adapter_loading:
        if operator_settings.api_key_file is None and KEYS_VARIABLE not in os.environ:
            raise click.UsageError(f"--allow-adapter-loading needs API keys: --api-key-file, or {KEYS_VARIABLE}")
        engine.setdefault("adapters", {})
    set_up_logging(as_json=operator_settings.log_format == "json")
    try:
        listener = listen(host, port, settings.max_stall)  # before anything is loaded, because it may be in use
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}, port {port}: {error.strerror or error}") from error
    record_to = _record_to(options["record"], options["record_size"], options["record_files"])
    llm = AsyncLLM(
        model,
        starts_at_once=True,
        record_to=record_to,
        kv_events=None if options["kv_events_config"] is None else KVEvents.parse(options["kv_events_config"]),
        **engine,
        **_given(options, "routing", "step_timeout"),
    )
    from inflight.server.run import serve_until_told

    if llm.tokenizer is None:
        logging.getLogger("inflight.server").warning("%s has no tokenizer: only token ids are taken and given", name)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"

    def tell_ready() -> None:
        if operator_settings.log_format == "json":
            logging.getLogger("inflight.server").info("%s is served at %s", name, address)
        else:
            click.echo(f"inflight: {name} is served at {address}")
        when_ready(address)

    try:
        serve_until_told(
            llm, settings, operator_settings, listener, tell_ready, os.environ.get(KEYS_VARIABLE), record_to
        )
    except EngineDeadError as error:
        raise click.ClickException(str(error)) from error


def _do_without_torch() -> None:
    """Keep torch out of this process, where only tokenizers and configurations are used: `transformers` imports it
    wherever it finds it, which takes a second and 250 MB. The engine's process has it."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # so that it is not found


def _record_to(path: str | None, max_bytes: int, num_files: int) -> "RecordTo | None":
    """Where the engine's process records its steps. Raises `InvalidRequestError` if no file can be written there."""
    if path is None:
        return None
    from inflight.contracts.record import RecordTo

    full = Path(path).expanduser().absolute()
    try:
        full.open("a").close()
    except OSError as error:
        raise InvalidRequestError(f"the recording {path!r} cannot be written: {error.strerror}") from error
    return RecordTo(path=str(full), max_bytes=max_bytes, num_files=num_files)


def _given(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names if options[name] is not None}
