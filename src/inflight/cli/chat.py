"""`inflight chat`: a chat in the terminal, with an engine in this process or with a server."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from inflight.cli.help import Command
from inflight.cli.options import (
    adapter_option,
    chat_options,
    engine_options,
    engine_values,
    model_argument,
    quiet_libraries,
    sampling_values,
)

if TYPE_CHECKING:
    from inflight.cli.chat_session import ChatBackend


@click.command(cls=Command)
@click.option("--url", help="An OpenAI-compatible server, such as http://127.0.0.1:8000, where --model is a name.")
@click.option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Sent to the server as a bearer token.")
@click.option("--system", help="The system prompt.")
@model_argument
@chat_options
@adapter_option
@engine_options
def chat(
    model: str | None,
    url: str | None,
    api_key: str | None,
    system: str | None,
    adapter: str | None,
    **options: Any,
) -> None:
    """Chat with a model, or with a server. MODEL means the same as --model MODEL.

    Each line is a message, answers are streamed, and the conversation is remembered. /help lists the commands; Ctrl-C
    stops an answer, Ctrl-D ends the chat. Messages may be piped in: then standard output has only the answers, and the
    first failure ends the chat.
    """
    from inflight.cli.chat_session import AnswerError, ChatSession, check_params, tell

    is_interactive = sys.stdin.isatty()
    try:
        sampling = sampling_values(options)
        engine = engine_values(options) | ({} if adapter is None else {"adapters": {adapter: adapter}})
        answerer = _answerer(model, url, api_key, engine, sampling)
        session = ChatSession(answerer, system, sampling)
        check_params(answerer, session.params)
        if is_interactive:
            tell(f"inflight: {answerer.name}; /help lists the commands, Ctrl-D ends")
        for line in _typed() if is_interactive else sys.stdin:
            try:
                if not session.take(line):
                    break
            except (AnswerError, ValueError) as error:
                if not is_interactive:
                    raise
                tell(f"inflight: {error}")
            except KeyboardInterrupt:
                if not is_interactive:
                    raise
                tell("(stopped)")
    except AnswerError as error:
        raise click.ClickException(str(error)) from error


def _answerer(
    model: str | None, url: str | None, api_key: str | None, engine: dict[str, Any], sampling: dict[str, Any]
) -> "ChatBackend":
    from inflight.cli.chat_session import EngineAnswerer, ServerAnswerer

    if url is not None:
        if engine:
            option = next(iter(engine)).replace("_", "-").replace("adapters", "adapter")
            raise click.UsageError(f"--{option} is for an engine in this process; it cannot be given with --url")
        return ServerAnswerer(url, model, api_key)
    quiet_libraries()
    from inflight import LLM, SamplingParams

    SamplingParams(**sampling)  # wrong options are refused before the model is loaded
    llm = LLM(model, **engine)
    if llm.tokenizer is not None and not llm.tokenizer.inner.chat_template:
        raise click.UsageError(
            "this model has no chat template: it completes texts, and cannot chat; try inflight generate"
        )
    return EngineAnswerer(llm, model or "the embedded model", next(iter(llm.adapters), None))


def _typed() -> Iterator[str]:
    """Yield lines from a terminal until Ctrl-D; Ctrl-C discards the current line."""
    with suppress(ImportError):
        import_module("readline")  # adds line editing and history
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return
