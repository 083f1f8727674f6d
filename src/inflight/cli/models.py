"""A server's models: MODEL arguments or `--model` options, perhaps named, and tables in its option file."""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from inflight.cli.help import Option
from inflight.cli.options import MODEL, Command, size
from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.options import flat_options

if TYPE_CHECKING:
    from inflight.server.models.pool import PoolSettings

NAME = re.compile(r"[A-Za-z0-9][\w.:-]*(/[\w.:-]+)?", re.ASCII)

ONE_MODEL_ONLY = {
    "served_model_names": ("--served-model-name", "names are given as NAME=MODEL"),
    "tokenizer": ("--tokenizer", "each model has its own"),
    "record": ("--record", "steps of one model are recorded"),
    "kv_events_config": ("--kv-events-config", "one model's prefix cache is told of"),
    "adapters": ("--adapter", "adapters are of one model, and stand in its table of a file for --config"),
    "allow_adapter_loading": ("--allow-adapter-loading", "adapters are of one model"),
}
"""Options that exclude several models, with reasons."""

OF_A_TABLE = {
    "model",
    *("tokenizer", "replicas", "routing", "step_timeout"),
    *("max_n", "max_num_sequences", "max_logprobs", "strict", "trust_request_chat_template", "tool_call_parser"),
    *flat_options(EngineConfig),
}
"""Parameters that a file may set for one of several models, in its table."""

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def duration(text: str) -> float:
    """Seconds: 90, 90s, 10m or 1.5h. Raises `click.BadParameter`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise click.BadParameter(f"{text!r} is no time; give seconds, or a number with a unit, such as 90s, 10m or 1h")
    return float(match[1]) * _UNITS[match[2].lower()]


class _ModelName(click.ParamType[str]):
    """A model; a variable may have several, separated by commas."""

    name = "text"
    envvar_list_splitter = ","

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value).strip()


def models_argument(command: Command) -> Command:
    """Add `--model`, and equivalent arguments, to a command without other arguments."""

    @click.argument("model_argument", metavar="[MODEL]...", nargs=-1)
    @click.option(
        "--model",
        "-m",
        cls=Option,
        heading=MODEL,
        multiple=True,
        type=_ModelName(),
        help="Hub id, folder or GGUF file of a model, or NAME=MODEL; repeat for more.  "
        "[default: the small embedded model]",
    )
    @click.option(
        "--max-loaded-models",
        cls=Option,
        heading=MODEL,
        type=click.IntRange(min=1),
        help="Most models loaded at once.  [default: all]",
    )
    @click.option(
        "--max-loaded-memory",
        cls=Option,
        heading=MODEL,
        type=size,
        help="Most memory of loaded models together, such as 24GiB.  [default: the free memory at the start]",
    )
    @click.option(
        "--idle-unload",
        cls=Option,
        heading=MODEL,
        type=duration,
        help="Unload a model unused for this long, such as 10m or 1h.  [default: never]",
    )
    @functools.wraps(command)
    def with_models(*args: Any, model: Sequence[str], model_argument: Sequence[str], **options: Any) -> Any:
        source = click.get_current_context().get_parameter_source("model")
        if model_argument and source is not ParameterSource.COMMANDLINE:
            model = ()  # from a file, or a variable
        return command(*args, models=(*model_argument, *model), **options)

    return with_models  # type: ignore[return-value]


def named(given: str) -> tuple[str | None, str]:
    """A model's name, or None, and its source."""
    name, equals, model = given.partition("=")
    if equals and model and NAME.fullmatch(name) and not Path(given).expanduser().exists():
        return name, model
    return None, given


def pool_settings(models: Sequence[str], options: Mapping[str, Any]) -> "PoolSettings | None":
    """The settings of a server with several models or unloading; None: a single permanent model. Raises
    `click.UsageError`."""
    tables: Mapping[str, Mapping[str, Any]] = options["models_tables"]
    if len(models) < 2 and options["idle_unload"] is None and not tables:
        return None
    from inflight.server.models.pool import PoolSettings
    from inflight.server.serving.settings import names_of

    for option, (flag, reason) in ONE_MODEL_ONLY.items():
        if options[option]:
            raise click.UsageError(
                f"{flag} goes neither with several models nor with --idle-unload or a table [models.NAME]: {reason}"
            )
    of_name: dict[str, str | None] = {}
    given: list[tuple[str | None, str | None]] = [named(each) for each in models]
    given += _of_tables(tables, {name for name, _ in given})
    for name, model in given or [(None, None)]:
        own = names_of(model)[0] if name is None else name
        if own in of_name:
            raise click.UsageError(f"there are two models called {own!r}; give one of them another name: NAME=MODEL")
        of_name[own] = model
    limits = {name: options[name] for name in ("max_loaded_models", "max_loaded_memory", "idle_unload")}
    own_options = {
        name: {option: value for option, value in table.items() if option != "model" and value is not None}
        for name, table in tables.items()
    }
    return PoolSettings(models=of_name, own_options=own_options, **limits)


def _of_tables(tables: Mapping[str, Mapping[str, Any]], elsewhere: set[str | None]) -> list[tuple[str | None, str]]:
    """The models of a file's tables, except those given elsewhere. Raises `click.UsageError`."""
    models: list[tuple[str | None, str]] = []
    for name, table in tables.items():
        if NAME.fullmatch(name) is None:
            raise click.UsageError(f"models.{name}: {name!r} is no name for a model")
        if name not in elsewhere:
            if len(table.get("model", ())) != 1:
                raise click.UsageError(f'models.{name} needs one model: model = "…"')
            models.append((name, table["model"][0]))
    return models
