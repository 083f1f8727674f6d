"""`inflight generate`: prompts from arguments, files or standard input; streamed text or JSON lines out.

Requests of OpenAI's batch files in `inflight generate`, answered by the server's own code.
"""

import asyncio
import json
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

import click

from inflight.cli import structure
from inflight.cli.help import Command
from inflight.cli.options import (
    adapter_option,
    engine_options,
    engine_values,
    model_option,
    quiet_libraries,
    replicas_option,
    sampling_options,
    sampling_values,
    tensor_parallel_option,
)
from inflight.cli.prompts import PromptLine, read_prompts
from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.step.multimodal import KINDS, NOUNS
from inflight.host.garbage_collection import freeze_loaded_objects

if TYPE_CHECKING:
    from inflight import LLM
    from inflight.contracts.api.outputs import RequestOutput, TextDelta, TokenLogprobs
    from inflight.contracts.api.params import SamplingParams
    from inflight.entrypoints.async_llm import AsyncLLM


MOST_IN_FLIGHT = 1000
"""Requests read and tokenized ahead: enough to fill the engine's slots."""


async def answer(llm: "AsyncLLM", lines: Sequence[PromptLine], take: Callable[[int, dict[str, Any]], None]) -> None:
    """Send all lines' bodies to their endpoints, and call `take` with the number of each line and its line of OpenAI's
    output, in the order in which they end. Then the engine is stopped.

    A refused request gets the server's answer, with a status of 400 or more. Every model name in the file means the
    loaded one. Raises `ModelError`.
    """
    from inflight.server.app import create_app
    from inflight.server.batches.answering import AppAnswerer
    from inflight.server.serving.settings import ANY_NAME, ServerSettings

    names = (name for line in lines if isinstance(name := (line.body or {}).get("model"), str) and name)
    app = create_app(llm, ServerSettings(model_name=next(names, "inflight"), model_aliases=(ANY_NAME,)))
    answerer, waiting = AppAnswerer(app, llm), iter(enumerate(lines))

    async def work() -> None:
        for number, line in waiting:
            status, body = await answerer.answer(line.url or "", json.dumps(line.body).encode())
            response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": json.loads(body or "null")}
            line_id = f"batch_req_{uuid.uuid4().hex}"
            take(number, {"id": line_id, "custom_id": line.custom_id, "response": response, "error": None})

    async with app.router.lifespan_context(app):
        await llm.start()
        freeze_loaded_objects()
        await asyncio.gather(*(work() for _ in range(min(MOST_IN_FLIGHT, len(lines)))))


def attachment_options(command: Any) -> Any:
    """Add `--image` and its like to a command."""
    for kind in reversed(KINDS):
        about = f"{NOUNS[kind].capitalize()} that a prompt is about, in a chat if the model has them; may be repeated."
        path = click.Path(exists=True, dir_okay=False)
        command = click.option(f"--{kind}", type=path, multiple=True, help=about)(command)
    return command


@click.command(cls=Command)
@click.argument("prompts", nargs=-1)
@click.option(
    "--file", "-f", type=Path, help="Prompts from a file: one per line, or JSON lines (.jsonl), with parameters."
)
@click.option("--output", "-o", type=Path, help="Write JSON lines here instead of to standard output.")
@click.option("--jsonl", is_flag=True, help="Write JSON lines even for a single prompt.")
@click.option("--chat", is_flag=True, help="Treat each prompt as a message to answer, through the chat template.")
@attachment_options
@click.option("--quiet", "-q", is_flag=True, help="No progress on standard error.")
@click.option("--record", type=Path, help="Record every step to a file, for inflight trace and simulate.")
@model_option
@adapter_option
@sampling_options
@replicas_option
@tensor_parallel_option
@engine_options
def generate(
    prompts: tuple[str, ...],
    model: str | None,
    file: Path | None,
    output: Path | None,
    chat: bool,
    record: Path | None,
    adapter: str | None,
    **options: Any,
) -> None:
    """Generate text for prompts. The text of a single prompt is streamed; several give JSON lines in their order.

    Without PROMPTS and --file, or for "-", prompts are read from standard input. A line of a JSON lines file is a
    string, a list of token ids, or an object with "prompt", "prompt_token_ids" or "messages" and, if wanted, sampling
    parameters. (Standard input is treated as JSON lines if it begins with an object.)

    Lines of OpenAI's batch files (custom_id, method, url, body) are answered in OpenAI's form.
    """
    lines = read_prompts(prompts, file)
    sampling = sampling_values(options) | structure_values(options)
    is_batch = any(line.body is not None for line in lines)
    if is_batch:
        given = {"chat": chat, "record": record, "adapter": adapter} | {kind: options[kind] for kind in KINDS}
        _check_batch(lines, [*sampling, *(name for name, value in given.items() if value)])
    for option, name in (("--replicas", "replicas"), ("--tensor-parallel-size", "tensor_parallel_size")):
        if record is not None and options[name] not in (None, 1):
            raise click.UsageError(f"--record writes what one process does; it cannot be given with {option}")
    out = _open(output)
    quiet_libraries()
    if is_batch:
        with out:
            _answer_batch(model, engine_values(options), lines, out, options["quiet"])
        return
    from inflight import LLM, SamplingParams
    from inflight.observe.progress import seconds_between_drawings, with_progress

    SamplingParams(**sampling)  # wrong options are refused before the model is loaded
    engine = engine_values(options) | ({} if adapter is None else {"adapters": {adapter: adapter}})
    llm = LLM(model, **engine)
    attached = [{"type": kind, kind: each} for kind in KINDS for each in options[kind]]
    inputs = [_input(line, chat, attached, llm) for line in lines]
    params = [_params(llm, sampling, line) for line in lines]
    is_plain = len(lines) == 1 and params[0].n == 1 and not params[0].asks_for_scores
    if is_plain and not options["jsonl"] and output is None and llm.tokenizer is not None:
        with _recorded(llm, record), closing(llm.stream(inputs[0], params, adapter=adapter)) as deltas:
            for delta in deltas:
                print(delta.text, end="", flush=True)
        print()
        if delta.output is not None and delta.output.error is not None:
            raise click.ClickException(delta.output.error)
        return
    with (
        out,
        _recorded(llm, record),
        closing(llm.stream(inputs, params, adapter=adapter)) as stream,
        _interrupts_between(stream) as deltas,
    ):
        shown = with_progress(deltas, len(lines), seconds_between=seconds_between_drawings())
        _write_in_order(deltas if options["quiet"] else shown, lines, out)


def structure_values(options: dict[str, Any]) -> dict[str, Any]:
    """The structured output of the flags, for `SamplingParams`, if any."""
    wanted = structure.from_flags(options)
    return {} if wanted is None else {"structured_output": wanted}


def _open(output: Path | None) -> TextIO:
    """Open the output for JSON lines, before loading anything large: a file, or standard output."""
    if output is None:
        return open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)
    try:
        return output.open("w", encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"the output file {str(output)!r} cannot be written: {error}") from error


def _input(line: PromptLine, chat: bool, parts: Sequence[dict[str, Any]], llm: "LLM") -> Any:
    if line.messages is not None:
        if parts:
            message = "a chat has its images, sounds and videos in its messages; with --image a prompt is text"
            raise InvalidRequestError(f"{line.where}: {message}")
        return {"messages": line.messages}
    if not chat and not parts:
        return line.prompt
    if not isinstance(line.prompt, str):
        raise InvalidRequestError(
            f"{line.where}: with --chat, --image, --audio or --video a prompt is the text of a message"
        )
    if not chat and llm.tokenizer is not None and not llm.tokenizer.inner.chat_template:
        given = {f"{kind}s": [part[kind] for part in parts if part["type"] == kind] for kind in KINDS}
        before = [llm.tokenizer.processor.of(part["type"]).placeholder for part in parts]
        return {"prompt": "".join([*before, line.prompt]), **given}
    content = [*parts, {"type": "text", "text": line.prompt}] if parts else line.prompt
    return {"messages": [{"role": "user", "content": content}]}


def _params(llm: "LLM", sampling: dict[str, Any], line: PromptLine) -> "SamplingParams":
    """Return the model's defaults without a token limit, overridden by the command's options, then by the line's."""
    try:
        own = dict(line.sampling)
        if "structured_output" in own:
            own["structured_output"] = structure.from_json(own["structured_output"])
        return replace(llm.get_default_sampling_params(), **{"max_tokens": None, **sampling, **own})
    except ValueError as error:
        raise InvalidRequestError(f"{line.where}: {error}" if line.where else str(error)) from error


@contextmanager
def _recorded(llm: "LLM", path: Path | None) -> Iterator[None]:
    """Record all steps within the block, if a file is named."""
    if path is None:
        yield
        return
    from inflight.observe.recorder import Recorder

    with Recorder(path, llm.config, llm.model_info) as recorder:
        llm.engine.observer = recorder.observe
        try:
            yield
        finally:
            llm.engine.observer = None
            llm.stats()  # only the running step is still recorded


@contextmanager
def _interrupts_between(deltas: "Iterator[TextDelta]") -> Iterator[Iterator["TextDelta"]]:
    """Delay Ctrl-C until the end of a step, so that no result is half written; a second Ctrl-C takes effect at once."""
    is_interrupted = False
    seen: set[tuple[int, int]] = set()  # since then; a step gives each sequence one piece at most

    def note(*_: object) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            raise KeyboardInterrupt
        is_interrupted = True

    def until_interrupted() -> "Iterator[TextDelta]":
        for delta in deltas:
            sequence = delta.prompt_index, delta.index
            if sequence in seen:
                raise KeyboardInterrupt
            yield delta
            if is_interrupted:
                seen.add(sequence)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield until_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


class _InOrder:
    """Writes results in order as soon as possible, and the rest on close."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._finished: dict[int, str] = {}
        self._next = 0

    def take(self, index: int, text: str) -> None:
        """Add the lines of prompt `index`."""
        self._finished[index] = text
        while self._next in self._finished:
            self._out.write(self._finished.pop(self._next))
            self._next += 1
        self._out.flush()

    def close(self) -> None:
        """Write lines that wait for missing ones."""
        self._out.writelines(self._finished[index] for index in sorted(self._finished))
        self._out.flush()


def _write_in_order(deltas: "Iterable[TextDelta]", lines: list[PromptLine], out: IO[str]) -> None:
    with closing(_InOrder(out)) as results:
        for delta in deltas:
            if delta.output is not None:
                index = delta.prompt_index
                results.take(index, _lines_of(index, delta.output, lines[index]))


def _lines_of(prompt_index: int, request: "RequestOutput", line: PromptLine) -> str:
    """A request's sequences as lines of JSON."""
    scores = request.prompt_logprobs
    text = ""
    for completion in request.outputs:
        record = {
            "prompt_index": prompt_index,
            "custom_id": line.custom_id,
            "index": completion.index,
            "prompt": request.prompt,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "logprobs": None if completion.logprobs is None else [_at_position(each) for each in completion.logprobs],
            "prompt_logprobs": None if scores is None else [each and _at_position(each) for each in scores],
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "error": request.error,
            "num_prompt_tokens": len(request.prompt_token_ids),
            "num_output_tokens": len(completion.token_ids),
        }
        given = {key: value for key, value in record.items() if value is not None}
        text += json.dumps(given, ensure_ascii=False) + "\n"
    return text


def _at_position(scores: "TokenLogprobs") -> list[dict[str, Any]]:
    """The log-probabilities at one position: first the actual token, then the likeliest ones."""
    return [{"token_id": token_id, **score._asdict()} for token_id, score in scores.items()]


# ------------------------------------------------------------------------------------------- OpenAI's batch files


def _check_batch(lines: list[PromptLine], given: list[str]) -> None:
    """Raise `InvalidRequestError` for prompts or options beside requests of OpenAI's batch format."""
    other = next((line for line in lines if line.body is None), None)
    if other is not None:
        raise InvalidRequestError(
            f"{other.where or 'an argument'} is a prompt, and other lines are requests of OpenAI's batch format; give "
            "one or the other"
        )
    if given:
        raise InvalidRequestError(
            f"{given[0]} is given as an option, but requests of OpenAI's batch format say everything in their bodies"
        )


def _answer_batch(
    model: str | None, engine: dict[str, Any], lines: list[PromptLine], out: IO[str], quiet: bool
) -> None:
    from inflight.entrypoints.async_llm import AsyncLLM
    from inflight.observe.progress import ProgressBar, seconds_between_drawings

    llm = AsyncLLM(model, **engine)
    progress = ProgressBar(0 if quiet else len(lines), seconds_between=seconds_between_drawings())
    with closing(_InOrder(out)) as results, closing(progress) as bar:

        def take(number: int, answer: dict[str, Any]) -> None:
            results.take(number, json.dumps(answer, ensure_ascii=False) + "\n")
            usage = (answer["response"]["body"] or {}).get("usage") or {}
            bar.count(usage.get("completion_tokens") or usage.get("output_tokens") or 0, 1)

        asyncio.run(answer(llm, lines, take))
