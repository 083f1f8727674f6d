"""`inflight show PROMPT …`: prints one step of a run: its tokens, its mask, and a check against the definition."""

from contextlib import closing
from pathlib import Path
from typing import Any

import click

from inflight.cli.help import Command
from inflight.cli.options import engine_options_with, engine_values, model_option, quiet_libraries

FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
PAGE_SIZE = 400
"""Columns and rows of a mask on a page, which scrolls."""

CACHE_MEMORY = 2**30
"""Bytes. Plenty for a few prompts, although the definition of attention keeps a second cache of the same size."""


@click.command(cls=Command)
@click.argument("prompts", nargs=-1, required=True)
@click.option("--step", type=click.IntRange(min=0), default=3, help="Which step; the first is 0.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=16, help="Tokens to generate for each prompt.")
@click.option("--html", type=FILE, help="Write the step as one self-contained page.")
@click.option("--png", type=FILE, help="Write the mask as a picture (needs matplotlib).")
@model_option
@engine_options_with(dtype="float32", max_num_seqs="one for each prompt", kv_cache_memory="1GiB")
def show(
    prompts: tuple[str, ...],
    model: str | None,
    step: int,
    max_tokens: int,
    html: Path | None,
    png: Path | None,
    **options: Any,
) -> None:
    """Run PROMPTS together, greedily, and print one step: the packed row, and which tokens attend to which.

    All prompts run at once unless --max-num-seqs is less; a small --max-num-batched-tokens shows chunks.
    """
    quiet_libraries()
    from rich.console import Console

    from inflight.contracts.params import SamplingParams
    from inflight.llm import LLM
    from inflight.observe.pictures import save_png, to_html, write_html
    from inflight.observe.step_capture import StepCapture
    from inflight.observe.step_drawing import StepDrawing
    from inflight.observe.step_figure import step_figure

    defaults = {"max_num_seqs": len(prompts), "kv_cache_memory": CACHE_MEMORY, "dtype": "float32"}
    llm = LLM(model, **{**defaults, **engine_values(options)})
    tokenizer = llm.tokenizer
    token_text = str if tokenizer is None else lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)
    capture = StepCapture(llm.engine.runner.witness_attention(), step, token_text)
    llm.engine.observer = capture.see
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with closing(llm.stream(prompts, params)) as deltas:
        for delta in deltas:
            if delta.output is not None and delta.output.error is not None:
                raise click.ClickException(delta.output.error)
            if capture.view is not None:
                break
    if capture.view is None:
        raise ValueError(f"the run has {capture.num_steps} steps, the first is 0: there is no step {step}")
    Console().print(StepDrawing(capture.view))
    if html is not None:
        write_html(html, f"inflight: step {step}", [to_html(StepDrawing(capture.view, PAGE_SIZE), PAGE_SIZE)])
    if png is not None:
        save_png(step_figure(capture.view), png)
