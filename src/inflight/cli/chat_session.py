"""A chat in the terminal: history, commands, and backends.

Answers go to standard output and everything else to standard error, so that a script that pipes messages in reads only
answers.
"""

import asyncio
import base64
import json
import mimetypes
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from inflight.contracts.step.multimodal import KINDS, NOUNS
from inflight.engine.admission import why_none_of
from inflight.loadtest.openai_client import OpenAIClient, ServerError

if TYPE_CHECKING:
    from inflight.contracts.api.params import SamplingParams
    from inflight.entrypoints.llm import LLM

HELP = """\
/help              show this help
/reset             forget the conversation
/system TEXT       use TEXT as the system prompt from now on; without TEXT, use none
/image PATH        attach an image to the next message; without PATH, attach none;
                   likewise /audio and /video
/params            show the sampling parameters
/params KEY=VALUE  set a parameter, such as temperature=0.7; KEY= restores the default
/quit              end the chat (so does Ctrl-D)
Ctrl-C stops an answer. Put a space before a message that begins with /."""

Messages = list[dict[str, Any]]
T = TypeVar("T")


class AnswerError(Exception):
    """An answer failed, perhaps after a part of it; the message says why."""


class ChatBackend(Protocol):
    """Answers messages. `params` are sampling parameters by name."""

    name: str

    def check(self, params: Mapping[str, Any]) -> None:
        """Raise `ValueError` for an invalid parameter."""

    def check_system(self, text: str) -> None:
        """Raise `ValueError` if system prompts are not supported."""

    def item_part(self, kind: str, path: Path) -> dict[str, Any]:
        """Return an image, sound or video as a part of a message. Raises `ValueError` if it, or any, cannot be read."""

    def answer(self, messages: Messages, params: Mapping[str, Any], show: Callable[[str], None]) -> str | None:
        """Stream the answer and return its finish reason. Raises `AnswerError`, `ValueError`."""


class EngineAnswerer:
    """Answers with an engine in this process."""

    def __init__(self, llm: "LLM", name: str, adapter: str | None = None) -> None:
        self.name = name
        self._llm, self._adapter = llm, adapter

    def check(self, params: Mapping[str, Any]) -> None:
        self._params(params)

    def check_system(self, text: str) -> None:
        if self._llm.tokenizer is not None:
            self._llm.tokenizer.chat([{"role": "system", "content": text}, {"role": "user", "content": "?"}])

    def item_part(self, kind: str, path: Path) -> dict[str, Any]:
        if (why_not := why_none_of(kind, self._llm.model_info)) is not None:
            raise ValueError(f"there can be no {KINDS[kind]}: {why_not}")
        assert self._llm.tokenizer is not None
        return {"type": kind, kind: self._llm.tokenizer.processor.of(kind).open(path)}

    def answer(self, messages: Messages, params: Mapping[str, Any], show: Callable[[str], None]) -> str | None:
        finish_reason = None
        stream = self._llm.stream({"messages": messages}, self._params(params), adapter=self._adapter)
        with closing(stream) as deltas:
            for delta in deltas:
                show(delta.text)
                finish_reason = delta.finish_reason
                if delta.output is not None and delta.output.error is not None:
                    raise AnswerError(delta.output.error)
        return finish_reason

    def _params(self, params: Mapping[str, Any]) -> "SamplingParams":
        return replace(self._llm.get_default_sampling_params(), **{"max_tokens": None, **params})


class ServerAnswerer:
    """Answers with an OpenAI-compatible server, which checks the parameters.

    Raises `AnswerError` if no `model` is given and the server cannot be asked for one.
    """

    def __init__(self, base_url: str, model: str | None, api_key: str | None) -> None:
        self._base_url, self._api_key = base_url, api_key
        self._model = model or asyncio.run(self._ask(OpenAIClient.first_model))
        self.name = f"{self._model} at {base_url}"

    def check(self, params: Mapping[str, Any]) -> None:
        pass

    def check_system(self, text: str) -> None:
        pass

    def item_part(self, kind: str, path: Path) -> dict[str, Any]:
        modalities = None
        with suppress(AnswerError):  # not every server has this endpoint
            modalities = asyncio.run(self._ask(lambda client: client.card(self._model))).input_modalities
        if modalities is not None and kind not in modalities:
            raise ValueError(f"there can be no {KINDS[kind]}: {self._model} reads none")
        try:
            data = base64.b64encode(path.read_bytes()).decode()
        except OSError as error:
            raise ValueError(f"{NOUNS[kind]} cannot be read: {error}") from error
        media_type = mimetypes.guess_type(path.name, strict=False)[0] or ""
        if not media_type.startswith((f"{kind}/", "image/gif")):
            raise ValueError(f"{NOUNS[kind]} cannot be read: {path.name!r} is not the name of one")
        if kind == "audio":
            return {"type": "input_audio", "input_audio": {"data": data, "format": path.suffix[1:]}}
        return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{media_type};base64,{data}"}}

    def answer(self, messages: Messages, params: Mapping[str, Any], show: Callable[[str], None]) -> str | None:
        body = json.dumps({"model": self._model, "messages": messages, "stream": True, **params})
        return asyncio.run(self._answer(body.encode(), show))

    async def _answer(self, body: bytes, show: Callable[[str], None]) -> str | None:
        finish_reason = None
        try:
            async with (
                OpenAIClient(self._base_url, self._api_key) as client,
                aclosing(client.stream("/v1/chat/completions", body)) as answer,
            ):
                async for chunks in answer:
                    for chunk in chunks:
                        show(chunk.text)
                        finish_reason = chunk.finish_reason or finish_reason
        except ServerError as error:
            raise AnswerError(str(error)) from error
        return finish_reason

    async def _ask(self, question: Callable[[OpenAIClient], Awaitable[T]]) -> T:
        try:
            async with OpenAIClient(self._base_url, self._api_key) as client:
                return await question(client)
        except ServerError as error:
            raise AnswerError(f"{self._base_url}: {error}") from error


@dataclass(slots=True)
class ChatSession:
    """The state of a chat.

    Attributes:
        system: the system prompt; None: there is none.
        params: the sampling parameters that were set.
        messages: the conversation, without the system prompt.
        items: parts of the next message, by kind.
    """

    answerer: ChatBackend
    system: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    messages: Messages = field(default_factory=list)
    items: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def take(self, line: str) -> bool:
        """Handle a line and return whether the chat continues.

        Raises `AnswerError`, `ValueError`, and `KeyboardInterrupt` if an answer was stopped; the chat can go on after
        any of them.
        """
        if not line.startswith("/"):
            if line.strip():
                self._say(line.strip())
            return True
        command, _, rest = line.strip().partition(" ")
        match command:
            case "/quit" | "/exit":
                return False
            case "/help":
                tell(HELP)
            case "/reset":
                self.messages.clear()
            case "/system":
                self._set_system(rest.strip())
            case "/image" | "/audio" | "/video":
                self._attach(command[1:], rest.strip())
            case "/params":
                self._set(rest.strip())
            case _:
                raise ValueError(f"there is no command {command}; /help lists all")
        return True

    def __post_init__(self) -> None:
        if self.system is not None:
            self._set_system(self.system)

    def _set_system(self, text: str) -> None:
        """Set the system prompt, or none; an unusable one changes nothing."""
        if text:
            try:
                self.answerer.check_system(text)
            except ValueError as error:
                raise ValueError(f"there can be no system prompt: {error}") from error
        self.system = text or None

    def _attach(self, kind: str, path: str) -> None:
        """Attach an image, sound or video to the next message, or none."""
        added = [self.answerer.item_part(kind, Path(os.path.expanduser(path)))] if path else []
        self.items[kind] = [*self.items.get(kind, ()), *added] if path else []
        tell(f"({KINDS[kind]} of the next message: {len(self.items[kind])})")

    def _say(self, text: str) -> None:
        """Send a message and show the answer. The shown part of a stopped answer is kept; a failed answer and its
        message are dropped."""
        before, pieces = list(self.messages), list[str]()
        items = list(chain.from_iterable(self.items.values()))
        content = [*items, {"type": "text", "text": text}] if items else text
        self.messages.append({"role": "user", "content": content})
        self.items = {}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]

        def show(piece: str) -> None:
            pieces.append(piece)
            print(piece, end="", flush=True)

        is_kept = False
        try:
            finish_reason = self.answerer.answer(system + self.messages, self.params, show)
            is_kept = True
        except KeyboardInterrupt:
            is_kept = any(pieces)
            raise
        except (AnswerError, ValueError):
            if system and not any(pieces):
                tell("(if it is for the system prompt: /system without a text removes it)")
            raise
        finally:
            if any(pieces):
                print(flush=True)
            self.messages = [*self.messages, {"role": "assistant", "content": "".join(pieces)}] if is_kept else before
        if finish_reason == "length":
            tell("(cut: max_tokens or the model's context is used up)")

    def _set(self, text: str) -> None:
        """Handle `/params`: `key=value` sets a parameter, `key=` restores its default, and no text shows all."""
        if not text:
            tell("\n".join(f"{name}={json.dumps(value)}" for name, value in self.params.items()) or "(all default)")
            return
        name, equals, value = (part.strip() for part in text.partition("="))
        if not name or not equals:
            raise ValueError(f"{text!r} is not KEY=VALUE, such as temperature=0.7")
        params = {key: kept for key, kept in self.params.items() if key != name}
        if value:
            params[name] = _value(value)
        check_params(self.answerer, params)
        self.params = params


def check_params(answerer: ChatBackend, params: Mapping[str, Any]) -> None:
    """Raise `ValueError` for parameters that a chat cannot have."""
    if params.get("n", 1) != 1:
        raise ValueError(f"n is {params['n']!r}; in a chat it must be 1")
    answerer.check(params)


def tell(text: str) -> None:
    """Print a text that is not part of an answer, to standard error."""
    print(text, file=sys.stderr, flush=True)


def _value(text: str) -> Any:
    """Return the text parsed as JSON, or else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
