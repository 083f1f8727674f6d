"""Commands with options from a file and the environment.

Precedence: command line, environment variables, file, defaults. Unknown names are refused. A file may also have tables
with options by name.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from inflight.cli.help import Command, Option

HEADING = "Options from elsewhere"
NOT_IN_FILES = {"config", "print_config", "help_all"}


class ConfigurableCommand(Command):
    """A command with `--config` and `--print-config`; its options are also variables, such as INFLIGHT_SERVE_PORT.

    Args:
        tables: kinds of tables in a file (`[models.NAME]`), with the parameters that each may set. The command gets
            them in a parameter of that name plus `_tables`: parameters by NAME.
    """

    def __init__(self, *args: Any, tables: Mapping[str, Collection[str]] | None = None, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.tables = tables or {}
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
                help="Print the effective options as such a file, and exit.",
            ),
        ]

    def invoke(self, ctx: click.Context) -> Any:
        self._check_variables()
        ctx.params |= {f"{kind}_tables": ctx.meta.get(_meta(kind), {}) for kind in self.tables}
        if ctx.params.pop("print_config"):
            click.echo(self._written(ctx))
            return None
        return super().invoke(ctx)

    def _options(self) -> dict[str, click.Option]:
        """The options by their names in a file."""
        return {
            _key(param): param
            for param in self.params
            if isinstance(param, click.Option) and param.name not in NOT_IN_FILES
        }

    def _read(self, ctx: click.Context, _: click.Parameter, path: Path | None) -> None:
        """Set the command's defaults from a file. Raises `click.UsageError`."""
        if path is None:
            return
        try:
            given = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise click.UsageError(f"{str(path)!r} cannot be read: {error.strerror}") from error
        except ValueError as error:  # not UTF-8, or not TOML
            raise click.UsageError(f"{str(path)!r} is not TOML: {error}") from error
        options, defaults = self._options(), {}
        for kind in self.tables.keys() & given.keys():
            ctx.meta[f"{_meta(kind)} as given"] = given[kind]
            ctx.meta[_meta(kind)] = self._read_tables(ctx, str(path), kind, given.pop(kind))
        for key, value in given.items():
            option = _option(str(path), key, options)
            assert option.name is not None
            defaults[option.name] = _value(f"{str(path)!r}: {key}", option, value)
        ctx.default_map = {**(ctx.default_map or {}), **defaults}

    def _read_tables(self, ctx: click.Context, path: str, kind: str, tables: Any) -> dict[str, dict[str, Any]]:
        """The parameters of a file's tables, by name. Raises `click.UsageError`."""
        options = self._options()
        read: dict[str, dict[str, Any]] = {}
        if not isinstance(tables, dict) or not all(isinstance(each, dict) for each in tables.values()):
            raise click.UsageError(f"{path!r}: {kind} must be tables: [{kind}.NAME]")
        for name, table in tables.items():
            read[name] = {}
            for key, value in table.items():
                option, where = _option(path, key, options), f"{path!r}: {kind}.{name}.{key}"
                if option.name is None or option.name not in self.tables[kind]:
                    raise click.UsageError(f"{where} is not an option of one of the {kind}")
                try:
                    read[name][option.name] = option.process_value(ctx, _value(where, option, value))
                except click.BadParameter as error:
                    raise click.UsageError(f"{where}: {error.message}") from error
        return read

    def _check_variables(self) -> None:
        names = {f"{self.prefix}_{(param.name or '').upper()}" for param in self.params}
        for name in os.environ:
            if name.startswith(f"{self.prefix}_") and name not in names:
                raise click.UsageError(f"the variable {name} names no option of this command{_hint(name, names)}")

    def _written(self, ctx: click.Context) -> str:
        """The options as a file; defaults are comments."""
        lines = []
        for key, option in self._options().items():
            name = option.name or ""
            value = ctx.params.get(name)
            is_default = ctx.get_parameter_source(name) is ParameterSource.DEFAULT
            if is_default and value in (None, (), False):
                value = self._defaults.get(name)
            if isinstance(value, Mapping):
                pairs = [f"{each}={value[each]}" for each in value]
                value = pairs if option.multiple else ",".join(pairs)
            text = "" if value in (None, ()) else json.dumps(value, ensure_ascii=False, default=str)
            lines.append(f"# {key}{f' = {text}' if text else ''}" if is_default else f"{key} = {text}")
        for kind in self.tables:
            for name, table in ctx.meta.get(f"{_meta(kind)} as given", {}).items():
                written = name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name, ensure_ascii=False)
                lines += ["", f"[{kind}.{written}]"]
                lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items()]
        return "\n".join(lines)


def _meta(kind: str) -> str:
    return f"{__name__}: {kind}"


def _option(path: str, key: str, options: Mapping[str, click.Option]) -> click.Option:
    """The option of a file's key. Raises `click.UsageError`."""
    option = options.get(key.replace("_", "-"))
    if option is None:
        raise click.UsageError(f"{path!r}: there is no option {key!r}{_hint(key, options)}")
    return option


def _key(option: click.Option) -> str:
    return max((each for each in option.opts if each.startswith("--")), key=len).removeprefix("--")


def _value(where: str, option: click.Option, value: Any) -> Any:
    """A file's value as on the command line. Raises `click.UsageError`."""
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
