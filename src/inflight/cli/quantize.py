"""`inflight quantize MODEL FOLDER`: writes a quantized model."""

import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from inflight.cli.help import Command
from inflight.cli.options import quiet_libraries
from inflight.cli.structure import in_bytes
from inflight.contracts.api.config import GROUP_SIZES

if TYPE_CHECKING:
    from inflight.entrypoints.quantization import QuantizedWeight


@click.command(cls=Command)
@click.argument("source", metavar="MODEL")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--format", "wanted", type=click.Choice(("int4", "int8")), default="int4", help="What weights become.")
@click.option(
    "--group-size",
    type=click.Choice([str(each) for each in GROUP_SIZES]),
    default="32",
    help="Of int4: weights that share a scale.",
)
@click.option("--minima", is_flag=True, help="Of int4: also a minimum per group: slightly larger and more accurate.")
@click.option("--revision", help="Branch, tag or commit of a hub repository.")
def quantize(source: str, folder: Path, wanted: str, group_size: str, minima: bool, revision: str | None) -> None:
    """Write a model with weights in four or eight bits, and print each weight's result.

    MODEL is a hub id, a folder or a GGUF file. FOLDER must be new or empty. The result is memory-mapped, and loads at
    once. Already quantized weights are kept, so GGUF files can be converted, too.
    """
    quiet_libraries()
    from inflight.entrypoints.quantization import quantize as run
    from inflight.text.tokenizer_files import read_tokenizer

    weights = run(
        source,
        folder,
        wanted,
        group_size=int(group_size),
        minima=minima,
        revision=revision,
        use_tqdm=sys.stderr.isatty(),
    )
    _print(weights)
    tokenizer = read_tokenizer(str(folder))
    can_chat = tokenizer is not None and tokenizer.inner.chat_template
    print(f"\nRun it: {f'inflight chat {folder}' if can_chat else f'inflight generate -m {folder} PROMPT'}")


def _print(weights: Sequence["QuantizedWeight"]) -> None:
    """Print the results; weights of all layers share a line."""
    from rich.console import Console
    from rich.table import Table

    alike: dict[tuple[str, str, str], list[QuantizedWeight]] = defaultdict(list)
    for each in weights:
        alike[re.sub(r"\d+", "*", each.name.removesuffix(".weight")), each.before, each.after].append(each)
    table = Table("weight", "number", "was", "is", "from", "to", box=None, pad_edge=False)
    table.columns[0].overflow = "fold"
    for number, column in enumerate(table.columns[1:], 1):
        column.no_wrap, column.justify = True, "right" if number in (1, 4, 5) else "left"
    for (name, before, after), members in (*alike.items(), (("all", "", ""), list(weights))):
        sizes = (sum(each.bytes_before for each in members), sum(each.bytes_after for each in members))
        table.add_row(name, f"{len(members):,}", before, after, *map(in_bytes, sizes))
    Console(highlight=False, markup=False).print(table)
