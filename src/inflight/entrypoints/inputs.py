"""Reads prompts into token ids. Knows no request: admission decides whether a prompt can run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from inflight.contracts.api.errors import InvalidRequestError, ModelError
from inflight.contracts.api.options import is_loaded_model
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.multimodal import KINDS, MultimodalInputs
from inflight.demo_model import DEMO_MODEL
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ReadPrompt(NamedTuple):
    """A prompt as a model reads it.

    Attributes:
        text: None: it is given as token ids, or a chat.
        multimodal: its images and sounds; None: it has none.
    """

    text: str | None
    token_ids: Sequence[int]
    cache_salt: str | None = None
    multimodal: MultimodalInputs | None = None


Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any] | ReadPrompt
"""Text, token ids, or a dict with "prompt", "prompt_token_ids" or "messages" (and "cache_salt", if it has one). A
"prompt" may have "images" (see `ImageSource`), "audios" (see `SoundSource`) and "videos" (see `VideoSource`), and
messages parts such as `{"type": "image", "image": …}`, or OpenAI's of type "input_audio". Or what `read_prompt`
returned."""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A chat: dicts with "role" and "content"."""

TEMPLATE_OPTIONS = {"chat_template", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
"""Keyword arguments for the chat template."""


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> ReadPrompt:
    """Tokenize a prompt, and process its images, sounds and videos, unless it is read. Raises `InvalidRequestError`."""
    if isinstance(prompt, ReadPrompt):
        return prompt
    if isinstance(prompt, str):
        if not prompt:  # even if the tokenizer would add tokens
            raise InvalidRequestError("the prompt is empty; it must have at least one character")
        _check_text(prompt)
        return ReadPrompt(prompt, _needed(tokenizer, "text").encode(prompt))
    if isinstance(prompt, Mapping):
        kind = next((key for key in ("prompt", "prompt_token_ids", "messages") if key in prompt), None)
        more = TEMPLATE_OPTIONS if kind == "messages" else {"images", "audios", "videos"} if kind == "prompt" else set()
        extra = set(prompt) - {kind, "cache_salt"} - more
        if kind is None or extra:
            raise InvalidRequestError(
                'a prompt given as a dict must have the key "prompt", "prompt_token_ids" or "messages" and no '
                'other but "cache_salt" (and "images", "audios" and "videos" beside a "prompt"); it has '
                f"{sorted(map(str, prompt))}"
            )
        salt = prompt.get("cache_salt")
        if kind == "messages":
            known = _needed(tokenizer, "a chat")
            messages, items = split_items(_messages(prompt["messages"]))
            if not any(items.values()):
                return ReadPrompt(None, known.chat(messages, **_options(prompt)), salt)
            text = known.render_chat(messages, **_options(prompt))
            token_ids, multimodal = known.processor.read(text, *items.values(), add_special_tokens=False)
            return ReadPrompt(None, token_ids, salt, multimodal)
        given = [prompt.get(name) or () for name in ("images", "audios", "videos")]
        if any(map(len, given)):
            _check_text(prompt["prompt"])
            token_ids, multimodal = _needed(tokenizer, "text").processor.read(prompt["prompt"], *given)
            return ReadPrompt(prompt["prompt"], token_ids, salt, multimodal)
        return read_prompt(prompt[kind], tokenizer)._replace(cache_salt=salt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | ReadPrompt):
        return ReadPrompt(None, prompt)
    raise InvalidRequestError(f"the prompt is a {type(prompt).__name__}; it must be text, token ids, or a dict")


def split_items(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """Messages whose parts of images, sounds and videos only mark a place, and what is in these places, by kind."""
    items: dict[str, list[Any]] = {kind: [] for kind in KINDS}

    def marked(part: Any) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "input_audio" and isinstance(given := part.get("input_audio"), Mapping):
            kind, part = "audio", {"audio": f"data:audio/{given.get('format')};base64,{given.get('data')}"}
        if kind not in items or kind not in part:
            return part
        items[kind].append(part[kind])
        return {"type": kind}

    contents = (message.get("content") for message in messages)
    split = [
        {**message, "content": list(map(marked, content))} if isinstance(content, list | tuple) else message
        for message, content in zip(messages, contents, strict=True)
    ]
    return split, items


def _check_text(text: str) -> None:
    """Raise `InvalidRequestError` for text with a lone surrogate, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = text[error.start]
        raise InvalidRequestError(
            f"the text has {character!r} at place {error.start}; it must be text that UTF-8 can encode"
        ) from None


def rendered_chat(prompt: Mapping[str, Any], tokenizer: Tokenizer | None) -> str:
    """Render a chat as text, to be encoded without adding special tokens. Raises `InvalidRequestError`."""
    return _needed(tokenizer, "a chat").render_chat(_messages(prompt["messages"]), **_options(prompt))


def default_params(prompt: Prompt, of_the_model: SamplingParams) -> SamplingParams:
    """Default parameters of a prompt: the model's own; but a chat's answer has no token limit, and ends when the model
    ends it or its context is full."""
    is_chat = isinstance(prompt, Mapping) and "messages" in prompt
    return replace(of_the_model, max_tokens=None) if is_chat else of_the_model


def check_chat(messages: object) -> None:
    """Raise `InvalidRequestError` unless this may be a chat, or a list of chats. The template checks the rest."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequestError(f"messages is {messages!r}; a chat is a list of dicts with a role and a content")


def _needed(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    if tokenizer is None:
        raise InvalidRequestError(
            f"the prompt is {what}, but this model has no tokenizer; give token ids, or the engine a tokenizer"
        )
    return tokenizer


def _options(prompt: Mapping[str, Any]) -> dict[str, Any]:
    return {name: prompt[name] for name in prompt if name in TEMPLATE_OPTIONS}


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidRequestError(f"messages is {messages!r}; a chat is a list of dicts with a role and a content")
    return [dict(message) for message in messages]


def model_source(model: object) -> "str | PreTrainedModel":
    """A hub id, a folder with `~` expanded, or a loaded model; None is the embedded model. Raises `ModelError` for
    anything else."""
    if model is None:
        return str(DEMO_MODEL)
    if is_loaded_model(model):
        return model
    if isinstance(model, str | os.PathLike):
        return os.path.expanduser(os.fspath(model))
    raise ModelError(
        f"the model is a {type(model).__name__}; it must be a hub id, a folder, or a transformers PreTrainedModel"
    )
