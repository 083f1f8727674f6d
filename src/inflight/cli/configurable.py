"""Commands whose options may also stand in a file and in the environment.

Decides what counts first: what is given on the command line, then variables, then the file, then defaults. Refuses, by
name, what no option of the command is called.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from inflight.cli.help import Command, Option

HEADING = "Options from elsewhere"
NOT_IN_FILES = {"config", "print_config"}


class ConfigurableCommand(Command):
    """A command with `--config` and `--print-config`; its options are also variables, such as INFLIGHT_SERVE_PORT."""

    def __init__(self, *args: Any, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.prefix = f"INFLIGHT_{(self.name or '').upper().replace('-', '_')}"
        self.context_settings = {**self.context_settings, "auto_envvar_prefix": self.prefix}
        self.params += [
            Option(
                ["--config"],
                heading=HEADING,
                type=click.Path(path_type=Path, dir_okay=False),
                help=f"A TOML file with options, such as port = 8000. Variables such as {self.prefix}_PORT count more, "
                "and the command line most.",
                is_eager=True,
                expose_value=False,
                callback=self._read,
            ),
            Option(
                ["--print-config"],
                heading=HEADING,
                is_flag=True,
                help="Print the options that apply, as such a file, and end.",
            ),
        ]

    def invoke(self, ctx: click.Context) -> Any:
        self._check_variables()
        if ctx.params.pop("print_config"):
            click.echo(self._written(ctx))
            return None
        return super().invoke(ctx)

    def _options(self) -> dict[str, click.Option]:
        """The options by the names that they have in a file."""
        return {
            _key(param): param
            for param in self.params
            if isinstance(param, click.Option) and param.name not in NOT_IN_FILES
        }

    def _read(self, ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
        """Let the file's values be this command's defaults. Raises `click.UsageError`."""
        if path is None:
            return
        try:
            given = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise click.UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from error
        except ValueError as error:  # not UTF-8, or not TOML
            raise click.UsageError(f"{str(path)!r} is not TOML: {error}") from error
        options, defaults = self._options(), {}
        for key, value in given.items():
            option = options.get(key.replace("_", "-"))
            if option is None or option.name is None:
                raise click.UsageError(f"{str(path)!r}: there is no option {key!r}{_hint(key, options)}")
            defaults[option.name] = _value(f"{str(path)!r}: {key}", option, value)
        ctx.default_map = {**(ctx.default_map or {}), **defaults}

    def _check_variables(self) -> None:
        names = {f"{self.prefix}_{(param.name or '').upper()}" for param in self.params}
        for name in os.environ:
            if name.startswith(f"{self.prefix}_") and name not in names:
                raise click.UsageError(f"the variable {name} names no option of this command{_hint(name, names)}")

    def _written(self, ctx: click.Context) -> str:
        """The options as a file; those that have their defaults are comments."""
        lines = []
        for key, option in self._options().items():
            name = option.name or ""
            value = ctx.params.get(name)
            is_default = ctx.get_parameter_source(name) is ParameterSource.DEFAULT
            if is_default and value in (None, (), False):
                value = self._defaults.get(name)
            text = "" if value in (None, ()) else json.dumps(value, ensure_ascii=False, default=str)
            lines.append(f"# {key}{f' = {text}' if text else ''}" if is_default else f"{key} = {text}")
        return "\n".join(lines)


def _key(option: click.Option) -> str:
    return max((each for each in option.opts if each.startswith("--")), key=len).removeprefix("--")


def _value(where: str, option: click.Option, value: Any) -> Any:
    """A file's value in the form that the command line would give it. Raises `click.UsageError`."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise click.UsageError(f"{where} is {value!r}; it must be true or false")
        return value
    if option.multiple:
        values = value if isinstance(value, list) else [value]
        return [_text(where, each) for each in values]
    return _text(where, value)


def _text(where: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise click.UsageError(f"{where} is {value!r}; it must be a text or a number")
    return str(value)


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
