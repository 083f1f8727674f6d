"""`inflight show PROMPT …`: prints steps of a run: tokens, masks, and a comparison with reference attention."""

import re
from pathlib import Path
from typing import Any

import click

from inflight.cli.help import Command
from inflight.cli.options import engine_options_with, engine_values, model_option, one_each, quiet_libraries, tokens
from inflight.cli.structure import say_if_long
from inflight.contracts.api.errors import InvalidRequestError

FILE = click.Path(dir_okay=False, writable=True, path_type=Path)
PAGE_SIZE = 400
"""Columns and rows of a mask on a page, which scrolls."""

CACHE_MEMORY = 2**30
"""Bytes of the cache: enough for a few prompts. Reference attention has a second one of this size."""

PROMPTS = ("Once upon a time", "One morning", "In a quiet village there lived a fox")
CAP = 4
"""Without other limits the first prompt gets this many tokens, the second twice as many, and so on, so that slots are
freed one by one."""


def steps(text: str) -> tuple[int, ...]:
    """Numbers of steps: 3, 2-4, or 1,3-5. Raises `click.BadParameter`."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise click.BadParameter(f"{text!r} are no steps; give their numbers, such as 3, 2-4 or 1,3-5")
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(numbers))


@click.command(cls=Command)
@click.argument("prompts", nargs=-1)
@click.option(
    "--step",
    "wanted",
    type=steps,
    help="Which steps, from 0: 3, 2-4 or 1,3-5.  [default: where a newcomer joins others, and the one before]",
)
@click.option(
    "--max-tokens",
    "caps",
    type=tokens,
    help=f"Most tokens for each prompt: one number, or one for each.  [default: {CAP},{2 * CAP},{3 * CAP}, …]",
)
@click.option("--ignore-eos", is_flag=True, help="Continue past the model's end tokens.")
@click.option("--html", type=FILE, help="Write the steps as one self-contained page.")
@click.option("--png", type=FILE, help="Write the masks as a picture (needs matplotlib).")
@model_option
@engine_options_with(dtype="float32", max_num_seqs="one less than there are prompts", kv_cache_memory="1GiB")
def show(
    prompts: tuple[str, ...],
    model: str | None,
    wanted: tuple[int, ...] | None,
    caps: tuple[int, ...] | None,
    ignore_eos: bool,
    html: Path | None,
    png: Path | None,
    **options: Any,
) -> None:
    """Show steps of a run: the tokens in the row, and which of them attend to which.

    PROMPTS run greedily; the default is three beginnings of stories. There is one slot less than prompts, so the last
    one waits until another is done: by default the step is shown in which it takes the freed slot, and its prefill
    shares a row with the others' decodes. A small --max-num-batched-tokens shows chunks.
    """
    prompts = prompts or PROMPTS
    caps = one_each(caps or tuple(CAP * number for number in range(1, len(prompts) + 1)), len(prompts))
    quiet_libraries()
    from rich.console import Console

    from inflight import LLM
    from inflight.contracts.api.params import SamplingParams
    from inflight.contracts.step.record import StepRecord
    from inflight.entrypoints.inputs import read_prompt
    from inflight.observe.pictures import check_pictures, save_png, to_html, write_html
    from inflight.observe.step_capture import StepCapture
    from inflight.observe.step_drawing import StepDrawing, step_figure

    if png is not None:
        check_pictures()
    num_slots = max(len(prompts) - 1, min(len(prompts), 2))
    defaults = {
        "max_num_seqs": num_slots,
        "kv_cache_memory": CACHE_MEMORY,
        "dtype": "float32",
        "speculation": "off",  # the number of draft tokens depends on step times
    }
    llm = LLM(model, **{**defaults, **engine_values(options)})
    tokenizer = llm.tokenizer
    token_text = str if tokenizer is None else lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False)
    capture = StepCapture(llm.engine.runner.compare_attention(), wanted, token_text)

    def observe(record: StepRecord) -> None:
        capture.observe(record)
        if record.step == 0:
            say_if_long(record.duration * (1 + max(wanted or [min(caps)])))

    llm.engine.observer = observe
    params = [SamplingParams(temperature=0, max_tokens=cap, ignore_eos=ignore_eos) for cap in caps]
    for number, (prompt, of_prompt) in enumerate(zip(prompts, params, strict=True)):
        try:
            read = read_prompt(prompt, tokenizer)
            accepted = llm.engine.inputs.accept(str(number), read.token_ids, of_prompt, multimodal=read.multimodal)
            llm.engine.submit(accepted)
        except InvalidRequestError as error:
            raise error if len(prompts) == 1 else type(error)(f"prompt {number}: {error}") from None
    while llm.engine.has_unfinished_requests and not capture.is_complete:
        for output in llm.engine.step():
            if output.error is not None:
                raise click.ClickException(output.error)
    views = capture.views
    missing = sorted(set(wanted or ()) - {view.step for view in views})
    if missing:
        raise ValueError(f"the run has {capture.num_steps} steps, the first is 0: there is no step {missing[0]}")
    capture.lanes.marked = [view.step for view in views]
    console = Console()
    console.print(capture.lanes)
    for view in views:
        console.print()
        console.print(StepDrawing(view))
    if html is not None:
        drawings = [to_html(capture.lanes, PAGE_SIZE)]
        drawings += [to_html(StepDrawing(view, PAGE_SIZE), PAGE_SIZE) for view in views]
        title = f"inflight: {'step' if len(views) == 1 else 'steps'} {', '.join(str(view.step) for view in views)}"
        write_html(html, title, drawings)
    if png is not None:
        save_png(step_figure(*views), png)
