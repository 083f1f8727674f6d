"""`inflight race`: runs the same requests through static waves, padded and ragged batches, and the engine."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inflight.cli.help import Command
from inflight.cli.options import config_options_with, engine_values, model_option, one_each, quiet_libraries, tokens
from inflight.cli.prompts import PromptLine, read_prompts
from inflight.cli.structure import say_if_long
from inflight.contracts.api.errors import InvalidRequestError

if TYPE_CHECKING:
    from inflight.engine.engine import Engine
    from inflight.lessons.run import LessonRequest
    from inflight.text.tokenizer import Tokenizer

DEFAULTS = {"max_num_seqs": 8, "dtype": "float32"}
METHODS = ("static", "padded", "ragged", "engine")
CAP = 120


@click.command(cls=Command)
@click.argument("prompts", nargs=-1)
@click.option(
    "--file", "-f", type=Path, help="Prompts from a file: one per line, or JSON lines (.jsonl), with max_tokens."
)
@click.option("--requests", "num_requests", type=click.IntRange(min=1), default=24, help="Random prompts, if none.")
@click.option(
    "--max-tokens",
    "caps",
    type=tokens,
    default=str(CAP),
    help="Most tokens for each prompt: one number, or one for each; for the longest of random ones.",
)
@click.option("--seed", type=int, default=0, help="Seed of random prompts and lengths.")
@click.option(
    "--method", "names", type=click.Choice(METHODS), multiple=True, help="Run only this one; may be repeated."
)
@click.option("--verbose", "-v", is_flag=True, help="Log the slots, with pictures of merges and filters.")
@click.option("--html", type=Path, help="Write timelines and table as one self-contained page (needs matplotlib).")
@click.option("--png", type=Path, help="Write the timelines as a picture (needs matplotlib).")
@model_option
@config_options_with(**DEFAULTS)
def race(
    prompts: tuple[str, ...],
    model: str | None,
    file: Path | None,
    caps: tuple[int, ...],
    names: tuple[str, ...],
    verbose: bool,
    **options: Any,
) -> None:
    """Run the same requests through static waves, padded and ragged batches, and the engine.

    They are shown live, then as timelines of the slots and a table. PROMPTS, and those of a file, end at the model's
    EOS or at their limits. Without any, prompts are random and each runs to its limit. In float32, the default here,
    all methods give the same tokens.
    """
    lines = read_prompts(prompts, file) if prompts or file is not None else []
    quiet_libraries()
    from rich.console import Console

    from inflight.observe.pictures import check_pictures

    if options["html"] or options["png"]:
        check_pictures()
    from inflight.contracts.api.config import EngineConfig
    from inflight.entrypoints.inputs import model_source
    from inflight.lessons.methods import Pace, Setting
    from inflight.lessons.race import mixed_requests, run_race, write_html, write_png
    from inflight.lessons.run import Options
    from inflight.text.tokenizer_files import load_tokenizer

    source, config = model_source(model), EngineConfig(**{**DEFAULTS, **engine_values(options)})
    tokenizer = load_tokenizer(source, None, config) if lines else None
    setting = Setting(source, config)
    log: Options = {"log": lambda line: print(line, file=sys.stderr)} if verbose else {}
    if lines:
        requests = _requests(lines, one_each(caps, len(lines)), setting.engine, tokenizer)
        log["eos_token_ids"] = setting.engine.model_info.eos_token_ids
        if tokenizer is not None:
            log["text_of"] = tokenizer.decode
    else:
        (most,) = one_each(caps, 1)
        requests = mixed_requests(options["num_requests"], most, setting.engine.model_info.vocab_size, options["seed"])
    methods = {name: method for name, method in setting.methods.items() if not names or name in names}
    pace = Pace.measure(setting.model, setting.num_slots, max(len(request.prompt_token_ids) for request in requests))
    say_if_long(len(methods) * pace.seconds(requests, setting.num_slots))
    console = Console()
    result = run_race(methods, requests, setting.num_slots, console, **log)
    console.print(result)
    for name, write in (("html", write_html), ("png", write_png)):
        if options[name]:
            write(result, options[name])


def _requests(
    lines: Sequence[PromptLine], caps: Sequence[int], engine: "Engine", tokenizer: "Tokenizer | None"
) -> "list[LessonRequest]":
    """Prompts as requests that fit into the model's context. Raises `InvalidRequestError`."""
    from inflight.contracts.api.params import SamplingParams
    from inflight.entrypoints.inputs import read_prompt
    from inflight.lessons.run import LessonRequest

    requests = []
    for number, (line, cap) in enumerate(zip(lines, caps, strict=True)):
        extra = sorted(line.sampling.keys() - {"max_tokens"}) or (["body"] if line.body is not None else [])
        if extra:
            raise InvalidRequestError(
                f"{line.where}: a race is greedy; besides a prompt it takes max_tokens, not {extra}"
            )
        try:
            params = SamplingParams(temperature=0, max_tokens=line.sampling.get("max_tokens", cap))
            prompt = {"messages": line.messages} if line.messages is not None else line.prompt or ""
            read = read_prompt(prompt, tokenizer)
            if read.multimodal is not None:
                raise InvalidRequestError("a race is run without images")
            accepted = engine.inputs.accept(str(number), read.token_ids, params)
        except ValueError as error:
            raise InvalidRequestError(f"{line.where or f'prompt {number}'}: {error}") from error
        token_ids = accepted.request.prompt_token_ids
        room = engine.model_info.max_model_len - len(token_ids)
        requests.append(LessonRequest(token_ids, min(params.max_tokens or room, room)))
    return requests
