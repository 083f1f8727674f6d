"""`inflight generate`: prompts from arguments, files or standard input; streamed text or JSON lines out."""

import json
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

import click

from inflight.cli.options import engine_options, engine_values, quiet_libraries, sampling_options, sampling_values
from inflight.cli.prompts import PromptLine, read_prompts
from inflight.contracts.errors import InvalidRequestError

if TYPE_CHECKING:
    from inflight.contracts.outputs import RequestOutput, TextDelta
    from inflight.contracts.params import SamplingParams
    from inflight.llm import LLM


@click.command()
@click.argument("prompts", nargs=-1)
@click.option("--model", "-m", help="Hub id or folder of the model; default: the small embedded model.")
@click.option(
    "--file", "-f", type=Path, help="Prompts from a file: one per line, or JSON lines (.jsonl) with parameters."
)
@click.option("--output", "-o", type=Path, help="Write JSON lines here instead of to standard output.")
@click.option("--jsonl", is_flag=True, help="Write JSON lines even for a single prompt.")
@click.option("--chat", is_flag=True, help="Treat each prompt as a message to answer, through the chat template.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on standard error.")
@click.option("--record", type=Path, help="Record every step to a file, for inflight trace and simulate.")
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
    record: Path | None,
    **options: Any,
) -> None:
    """Generate text for PROMPTS: streamed for a single prompt, as JSON lines in the prompts' order for several.

    Without PROMPTS and --file, or for "-", prompts are read from standard input. A line of a JSON lines file is a
    string, a list of token ids, or an object with "prompt", "prompt_token_ids" or "messages" and, if wanted, sampling
    parameters. (Standard input is treated as JSON lines if it begins with an object.)
    """
    lines = read_prompts(prompts, file)
    out = _open(output)
    quiet_libraries()
    from inflight.llm import LLM
    from inflight.observe.progress import with_progress

    llm = LLM(model, **engine_values(options))
    inputs = [_input(line, chat) for line in lines]
    params = [_params(llm, sampling_values(options), line) for line in lines]
    if len(lines) == 1 and params[0].n == 1 and not jsonl and output is None and llm.tokenizer is not None:
        with _recorded(llm, record), closing(llm.stream(inputs[0], params)) as deltas:
            for delta in deltas:
                print(delta.text, end="", flush=True)
        print()
        if delta.output is not None and delta.output.error is not None:
            raise click.ClickException(delta.output.error)
        return
    with out, _recorded(llm, record), closing(llm.stream(inputs, params)) as deltas, _interrupts_between_steps(llm):
        _write_in_order(deltas if quiet else with_progress(deltas, len(lines)), lines, out)


def _open(output: Path | None) -> TextIO:
    """Open the output for JSON lines, before anything large is loaded: a writable file, or standard output."""
    if output is None:
        return open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)
    try:
        return output.open("w", encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"the output file {str(output)!r} cannot be written: {error}") from error


def _input(line: PromptLine, chat: bool) -> Any:
    if line.messages is not None:
        return {"messages": line.messages}
    if not chat:
        return line.prompt
    if not isinstance(line.prompt, str):
        raise InvalidRequestError(f"{line.where}: with --chat a prompt is the text of a message")
    return {"messages": [{"role": "user", "content": line.prompt}]}


def _params(llm: "LLM", sampling: dict[str, Any], line: PromptLine) -> "SamplingParams":
    """Return the model's defaults without a token limit, overridden by the command's options, then by the line's."""
    try:
        return replace(llm.get_default_sampling_params(), **{"max_tokens": None, **sampling, **line.sampling})
    except ValueError as error:
        raise InvalidRequestError(f"{line.where}: {error}" if line.where else str(error)) from error


@contextmanager
def _recorded(llm: "LLM", path: Path | None) -> Iterator[None]:
    """Record all steps within the block, if a file is named."""
    if path is None:
        yield
        return
    from inflight.observe.recorder import Recorder

    with Recorder(path, llm.engine.config, llm.engine.model_info) as recorder:
        llm.engine.observer = recorder.see
        try:
            yield
        finally:
            llm.engine.observer = None


@contextmanager
def _interrupts_between_steps(llm: "LLM") -> Iterator[None]:
    """Delay Ctrl-C to the end of a step, so that no result is half written; a second Ctrl-C takes effect at once."""
    is_interrupted = False

    def note(*_: object) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            raise KeyboardInterrupt
        is_interrupted = True

    def interrupt(_: object) -> None:
        if is_interrupted:
            raise KeyboardInterrupt

    from inflight.observe.recorder import observe_with

    before, observer = signal.signal(signal.SIGINT, note), llm.engine.observer
    llm.engine.observer = observe_with(observer, interrupt)
    try:
        yield
    finally:
        llm.engine.observer = observer
        signal.signal(signal.SIGINT, before)


def _write_in_order(deltas: "Iterable[TextDelta]", lines: list[PromptLine], out: IO[str]) -> None:
    """Write each result as soon as all before it are written; if interrupted, all finished results."""
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
