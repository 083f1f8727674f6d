"""`inflight info MODEL`: shows what preparation found about a model, and how it will run.

`inflight prepare MODEL`: prepares a model ahead of its first start.
"""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from inflight.cli.help import Command
from inflight.cli.options import engine_options, engine_values, model_argument, quiet_libraries
from inflight.cli.structure import in_bytes, in_words
from inflight.contracts.api.errors import ModelError
from inflight.gguf.find import find_gguf
from inflight.gguf.header import GgufHeader
from inflight.gguf.summary import GgufSummary
from inflight.text.tokenizer import Tokenizer
from inflight.text.tokenizer_files import read_tokenizer

if TYPE_CHECKING:
    from rich.console import Console

    from inflight import LLM
import time


@click.command(cls=Command)
@model_argument
@engine_options
def prepare(model: str | None, **options: Any) -> None:
    """Load a model once, so that later starts are faster. MODEL means the same as --model MODEL.

    This builds the kernels if they are missing, proves the model, and caches the result in ~/.cache/inflight, for the
    same files and options on this machine."""
    quiet_libraries()
    from inflight import LLM

    start = time.monotonic()
    info = LLM(model, **engine_values(options)).model_info
    seconds = time.monotonic() - start
    click.echo(
        f"{info.model_class} is ready after {seconds:.1f} s: it runs {info.executor}, proved on {info.proved_on}"
    )


CONTEXTS = (4096, 32768)
"""Lengths for which the cache's memory is shown."""

ARITHMETICS = {
    "fast": "activations of quantized layers are rounded to int8",
    "exact": "quantized weights are expanded first",
}

KERNELS = {"native": "built for this CPU", None: "torch's only"}


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--load", "loads", is_flag=True, help="Load a GGUF file, too, instead of reading only its header.")
@click.option("--verify", is_flag=True, help="Prove the model even if an earlier result is cached.")
@model_argument
@engine_options
def info(model: str | None, as_json: bool, loads: bool, verify: bool, **options: Any) -> None:
    """Load and prove a model, and print the findings. MODEL means the same as --model MODEL.

    For a GGUF file, print its header's facts, without loading it."""
    quiet_libraries()
    gguf = None if loads or verify or model is None else find_gguf(model, options.get("revision"))
    if gguf is not None:
        summary = GgufSummary.from_header(GgufHeader.read(gguf))
        try:
            tokenizer, notes = read_tokenizer(str(gguf)), []
        except ModelError as error:
            tokenizer, notes = None, [str(error)]
        ends, notes = (tokenizer.ends(), [*tokenizer.notes]) if tokenizer else ({}, notes)
        if as_json:
            named = {"eos_token_ids": [*ends], "eos_named_by": [*ends.values()], "notes": notes}
            print(json.dumps({**asdict(summary), **named, "answers": _answers(tokenizer)}, indent=2))
        else:
            found = {"ends at": _ends(tokenizer, ends), "answers": _answers(tokenizer), "notes": "\n".join(notes)}
            _print({**_header_for_people(summary), **found})
        return
    from inflight import LLM

    llm = LLM(model, verify=verify, **engine_values(options))
    if as_json:
        print(json.dumps({**asdict(llm.model_info), **_around(llm)}, indent=2))
        return
    console = _print(_for_people(llm))
    if _gains_from_bfloat16(llm):
        console.print("\nOn this CPU --dtype bfloat16 takes half of the memory and is faster, but it is not exact.")


def _print(lines: dict[str, str]) -> "Console":
    """Print names with values, leaving out empty ones."""
    from rich.console import Console
    from rich.table import Column, Table

    table = Table.grid(Column(style="dim", no_wrap=True), "", padding=(0, 2))
    for name, words in lines.items():
        if words:
            table.add_row(name, words)
    console = Console(highlight=False, markup=False)
    console.print(table)
    return console


def _header_for_people(summary: GgufSummary) -> dict[str, str]:
    """The facts of a GGUF file's header."""
    per_token = summary.cache_bytes_per_token
    needed = [f"{length:,} tokens {in_bytes(length * per_token)}" for length in CONTEXTS if length < summary.context]
    if summary.context:
        needed.append(f"{summary.context:,} tokens {in_bytes(summary.context * per_token)}")
    kinds = [f"{each.number} in {each.kind}, {in_bytes(each.num_bytes)}" for each in summary.tensors]
    return {
        "file": f"{summary.path}, {in_bytes(sum(each.num_bytes for each in summary.tensors))}",
        "model": f"{summary.name or 'unnamed'}, {summary.architecture}, {in_words(summary.num_parameters)} parameters",
        "tensors": "\n".join(kinds),
        "context": f"{summary.context:,} tokens" if summary.context else "not stated",
        "cache": ", ".join([f"{in_bytes(per_token)} a token in 16 bits", *needed]) if per_token else "",
        "chat template": "yes" if summary.has_chat_template else "none: it completes texts, and cannot chat",
    }


def _ends(tokenizer: Tokenizer | None, ends: dict[int, str]) -> str:
    """The tokens that end a sequence with their sources, line by line."""
    return "\n".join(
        f"{each if tokenizer is None else tokenizer.text_of(each)} ({names})" for each, names in ends.items()
    )


def _answers(tokenizer: Tokenizer | None) -> str:
    """The notation of calls and reasoning."""
    from inflight.server.chat_format.answer_template import shown_notation

    return "" if tokenizer is None else shown_notation(tokenizer)


def _around(llm: "LLM") -> dict[str, Any]:
    """Facts beyond `ModelInfo`: memory in bytes, and whether it can chat."""
    info = llm.model_info
    per_block = info.kv_bytes_per_token * info.block_size // len(info.cache_groups)
    return {
        "weight_bytes": sum(each.num_bytes for each in info.weights),
        "cache_bytes": info.num_blocks * per_block,
        "has_chat_template": llm.tokenizer is not None and bool(llm.tokenizer.inner.chat_template),
        "answers": _answers(llm.tokenizer),
    }


def _for_people(llm: "LLM") -> dict[str, str]:
    """The same in words, line by line."""
    info, around = llm.model_info, _around(llm)
    own = "" if info.checkpoint_dtype == info.dtype else f"; the checkpoint is in {info.checkpoint_dtype}"
    kinds = ", ".join(f"{each.kind} {in_bytes(each.num_bytes)}" for each in info.weights)
    arithmetic = f"; {ARITHMETICS[info.arithmetic]}" if info.arithmetic else ""
    errors = f"logits differ by at most {info.logits_error:.1e} of their range"
    if info.executor == "generate":
        errors = "it is the model itself"
    if info.attention_error is not None:
        errors += f", attention by {info.attention_error:.1e}"
    ends = dict(zip(info.eos_token_ids, info.eos_named_by, strict=True))
    return {
        "model": f"{info.model_class}, {in_words(info.num_parameters)} parameters, a vocabulary of {info.vocab_size:,}",
        "reads": ", ".join(("text", *(f"{each}s" for each in info.input_modalities))),
        "weights": f"{in_bytes(around['weight_bytes'])}: {kinds}",
        "computes": f"in {info.dtype}{own}{arithmetic}",
        "runs": f"on {info.device} with {info.threads}, {info.executor}, attention by "
        f"{info.attention_backend}, forward pass {info.forward_pass}",
        "kernels": KERNELS.get(info.kernels) or f"the package's, for {info.kernels}",
        "proved": f"on {info.proved_on}: {errors}",
        "same bits": "alone and in any batch" if info.is_batch_invariant else "not promised in other company",
        "attention": "\n".join(info.attention_calls),
        "context": f"{info.max_model_len:,} tokens"
        + (f"; the cache holds {info.max_cached_len:,}" if info.max_cached_len < info.max_model_len else ""),
        "cache": f"{in_bytes(around['cache_bytes'])}: {info.num_blocks:,} blocks of {info.block_size} tokens, "
        f"{in_bytes(info.kv_bytes_per_token)} a token"
        + (f", {in_bytes(info.state_bytes)} a recurrent state" if info.state_bytes else "")
        + (f", {info.num_states:,} of them" if info.num_states else "")
        + ("" if info.can_share_prefixes else "; prefixes cannot be shared"),
        "speculation": info.speculation,
        "ends at": _ends(llm.tokenizer, ends) or "nothing: give --max-tokens",
        "chat template": "yes" if around["has_chat_template"] else "none: it completes texts, and cannot chat",
        "answers": around["answers"],
        "notes": "\n".join(info.notes),
    }


def _gains_from_bfloat16(llm: "LLM") -> bool:
    from inflight.execution.hf.load import has_fast_bfloat16

    info = llm.model_info
    return info.device == "cpu" and info.dtype == "float32" and info.quantization is None and has_fast_bfloat16()
