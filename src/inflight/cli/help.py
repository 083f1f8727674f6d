"""Formats `--help`: options under headings with their defaults, and summaries as whole sentences."""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import click

from inflight.contracts.api.foreign_names import hint

SHOWS_ALL = "inflight.shows_all"
OWN = "Options"
"""The heading of the options that a command does not share with others."""

RARE = frozenset(
    {
        # of a server
        *("max_n", "max_num_sequences", "max_logprobs", "step_timeout", "keep_alive_interval", "max_stall", "strict"),
        *("trust_request_chat_template", "max_file_size", "record_size", "record_files", "kv_events_config", "ui"),
        *("max_body_size", "max_requests", "timeout_keep_alive", "grace_period", "log_text", "traces_endpoint"),
        *("allow_adapter_loading", "adapter_memory", "routing", "max_loaded_memory", "cors_origins", "print_config"),
        *("uds", "root_path", "response_store", "response_store_size"),
        *("allowed_media_domains", "allowed_local_media_path"),
        # of an engine
        *("load_format", "quantization_group_size", "quantization_minima", "quantization_arithmetic"),
        *("record_forward", "executor", "attention_backend", "max_prefill_tokens_per_step", "policy", "aging_steps"),
        *("background_tokens_per_step", "max_draft_tokens", "max_num_waiting", "enable_prefix_caching"),
        *("block_size", "num_blocks", "prefix_cache_size", "prefix_retention", "device"),
    }
)
"""Parameters shown only by `--help-all`."""


class Option(click.Option):
    """An option under a heading."""

    def __init__(self, *declarations: Any, heading: str = OWN, **attributes: Any) -> None:
        super().__init__(*declarations, **attributes)
        self.heading = heading


class Command(click.Command):
    """A command whose options stand under headings, in the order of their first options.

    Args:
        settings: dataclasses whose fields have the defaults of the command's own options.
    """

    def __init__(self, *args: Any, settings: tuple[type[Any], ...] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._defaults = {field.name: field.default for owner in settings for field in fields(owner)}
        if any(param.name in RARE for param in self.params):
            self.params.append(
                Option(
                    ["--help-all"],
                    is_flag=True,
                    is_eager=True,
                    expose_value=False,
                    callback=_show_all,
                    help="Show all options and exit.",
                )
            )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            meaning = hint(error.option_name.lstrip("-").replace("-", "_"), _flag)
            if meaning is None:
                raise
            raise click.UsageError(f"No such option: {error.option_name}; {meaning}", ctx) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records: dict[str, list[tuple[str, str]]] = {OWN: []}
        for option in self.get_params(ctx):
            if option.name in RARE and not ctx.meta.get(SHOWS_ALL):
                continue
            if isinstance(option, click.Option) and (record := option.get_help_record(ctx)) is not None:
                default = self._defaults.get(option.name or "", "")
                shown = "" if default in ("", False, ()) else f"  [default: {'none' if default is None else default}]"
                records.setdefault(getattr(option, "heading", OWN), []).append((record[0], record[1] + shown))
        for heading, lines in records.items():
            with formatter.section(heading):
                formatter.write_dl(lines)

    def get_short_help_str(self, limit: int = 0) -> str:
        return first_sentence(self.help or "")


class Group(click.Group):
    """A command with sub-commands, which may stand under headings.

    Args:
        headings: names of sub-commands by heading; without it all stand under one.
    """

    command_class = Command

    def __init__(self, *args: Any, headings: Mapping[str, tuple[str, ...]] | None = None, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.headings = headings

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for heading, names in (self.headings or {"Commands": tuple(self.commands)}).items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:{width}}", self.commands[name].get_short_help_str()) for name in names])

    def get_short_help_str(self, limit: int = 0) -> str:
        return first_sentence(self.help or "")


def _show_all(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        ctx.meta[SHOWS_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def first_sentence(text: str) -> str:
    """The first sentence of a help text, without its full stop."""
    return re.split(r"\.(?:\s|$)", " ".join(text.split()), maxsplit=1)[0]
