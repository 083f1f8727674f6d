"""`inflight generate`: prompts from arguments, files or standard input; streamed text or JSON lines out."""

import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from inflight.cli.options import engine_options, engine_values, quiet_libraries, sampling_options, sampling_values
from inflight.cli.prompts import PromptLine, read_prompts
from inflight.errors import InvalidRequestError

if TYPE_CHECKING:
    from inflight.llm import LLM
    from inflight.outputs import RequestOutput, TextDelta
    from inflight.params import SamplingParams


@click.command()
@click.argument("prompts", nargs=-1)
@click.option("--model", "-m", help="Hub id or folder of the model; without it, the small embedded one.")
@click.option(
    "--file", "-f", type=Path, help="Prompts from a file: one a line, or JSON lines (.jsonl) with parameters."
)
@click.option("--output", "-o", type=Path, help="Write JSON lines here instead of to standard output.")
@click.option("--jsonl", is_flag=True, help="JSON lines even for a single prompt.")
@click.option("--chat", is_flag=True, help="Each prompt is a message to answer, by the model's chat template.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on standard error.")
@sampling_options
@engine_options
def generate(
    prompts: tuple[str, ...],
    model: str | None,
    file: Path | None,
    output: Path | None,
    jsonl: bool,
    chat: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Generate text for PROMPTS: streamed for one, JSON lines in the prompts' order for many.

    Without PROMPTS and --file, or for a "-", standard input is read. A line of a JSON lines file is a string, a list of
    token ids, or an object with "prompt", "prompt_token_ids" or "messages", and any sampling parameters of its own.
    """
    lines = read_prompts(prompts, file)
    quiet_libraries()
    from inflight.llm import LLM
    from inflight.observe.progress import with_progress

    llm = LLM(model, **engine_values(options))
    inputs = [_input(line, chat) for line in lines]
    params = [_params(llm, sampling_values(options), line) for line in lines]
    if len(lines) == 1 and params[0].n == 1 and not jsonl and output is None and llm.tokenizer is not None:
        for delta in llm.stream(inputs[0], params):
            print(delta.text, end="", flush=True)
        print()
        return
    deltas = with_progress(llm.stream(inputs, params), len(lines), enabled=not quiet)
    with output.open("w", encoding="utf-8") if output is not None else nullcontext(sys.stdout) as out:
        _write_in_order(deltas, lines, out)


def _input(line: PromptLine, chat: bool) -> Any:
    if line.messages is not None:
        return {"messages": line.messages}
    return {"messages": [{"role": "user", "content": line.prompt}]} if chat else line.prompt


def _params(llm: "LLM", sampling: dict[str, Any], line: PromptLine) -> "SamplingParams":
    """The model's own defaults, without a limit; then the command's options; then the line's."""
    try:
        return replace(llm.get_default_sampling_params(), **{"max_tokens": None, **sampling, **line.sampling})
    except ValueError as error:
        raise InvalidRequestError(f"{line.where}: {error}" if line.where else str(error)) from error


def _write_in_order(deltas: "Iterable[TextDelta]", lines: list[PromptLine], out: IO[str]) -> None:
    """Write each result as soon as all before it are written; if interrupted, whatever has finished."""
    finished: dict[int, RequestOutput] = {}
    next_index = 0
    try:
        for delta in deltas:
            if delta.output is not None:
                finished[delta.prompt_index] = delta.output
            while next_index in finished:
                _write(next_index, finished.pop(next_index), lines[next_index], out)
                next_index += 1
    finally:
        for index in sorted(finished):
            _write(index, finished[index], lines[index], out)


def _write(prompt_index: int, request: "RequestOutput", line: PromptLine, out: IO[str]) -> None:
    for completion in request.outputs:
        record = {
            "prompt_index": prompt_index,
            "custom_id": line.custom_id,
            "index": completion.index,
            "prompt": request.prompt,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "error": request.error,
            "num_prompt_tokens": len(request.prompt_token_ids),
            "num_output_tokens": len(completion.token_ids),
        }
        out.write(
            json.dumps({key: value for key, value in record.items() if value is not None}, ensure_ascii=False) + "\n"
        )
    out.flush()
