"""Reads prompts into token ids. Knows no request: admission decides whether a prompt can run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from inflight.contracts.api.errors import InvalidRequestError, ModelError
from inflight.contracts.api.options import is_loaded_model
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.multimodal import MultimodalInputs
from inflight.demo_model import DEMO_MODEL
from inflight.text.processor import ImageSource
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ReadPrompt(NamedTuple):
    """A prompt as a model reads it.

    Attributes:
        text: None: it is given as token ids, or a chat.
        multimodal: its images; None: it has none.
    """

    text: str | None
    token_ids: Sequence[int]
    cache_salt: str | None = None
    multimodal: MultimodalInputs | None = None


Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any] | ReadPrompt
"""Text, token ids, or a dict with "prompt", "prompt_token_ids" or "messages" (and "cache_salt", if it has one). A
"prompt" may have "images" (see `ImageSource`), and messages parts `{"type": "image", "image": …}`. Or what
`read_prompt` returned."""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A chat: dicts with "role" and "content"."""

TEMPLATE_OPTIONS = {"chat_template", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
"""Keyword arguments for the chat template."""


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> ReadPrompt:
    """Tokenize a prompt, and process its images, unless it is read already. Raises `InvalidRequestError`."""
    if isinstance(prompt, ReadPrompt):
        return prompt
    if isinstance(prompt, str):
        if not prompt:  # even if the tokenizer would add tokens
            raise InvalidRequestError("the prompt is empty; it must have at least one character")
        _check_text(prompt)
        return ReadPrompt(prompt, _needed(tokenizer, "text").encode(prompt))
    if isinstance(prompt, Mapping):
        kind = next((key for key in ("prompt", "prompt_token_ids", "messages") if key in prompt), None)
        more = TEMPLATE_OPTIONS if kind == "messages" else {"images"} if kind == "prompt" else set()
        extra = set(prompt) - {kind, "cache_salt"} - more
        if kind is None or extra:
            raise InvalidRequestError(
                'a prompt given as a dict must have the key "prompt", "prompt_token_ids" or "messages" and no '
                f'other but "cache_salt" (and "images" beside a "prompt"); it has {sorted(map(str, prompt))}'
            )
        salt = prompt.get("cache_salt")
        if kind == "messages":
            known = _needed(tokenizer, "a chat")
            messages, images = split_images(_messages(prompt["messages"]))
            if not images:
                return ReadPrompt(None, known.chat(messages, **_options(prompt)), salt)
            text = known.render_chat(messages, **_options(prompt))
            token_ids, multimodal = known.processor.read(text, images, add_special_tokens=False)
            return ReadPrompt(None, token_ids, salt, multimodal)
        if given := prompt.get("images"):
            _check_text(prompt["prompt"])
            token_ids, multimodal = _needed(tokenizer, "text").processor.read(prompt["prompt"], given)
            return ReadPrompt(prompt["prompt"], token_ids, salt, multimodal)
        return read_prompt(prompt[kind], tokenizer)._replace(cache_salt=salt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | ReadPrompt):
        return ReadPrompt(None, prompt)
    raise InvalidRequestError(f"the prompt is a {type(prompt).__name__}; it must be text, token ids, or a dict")


def split_images(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Messages whose image parts only mark a place, and the images of these places."""
    images: list[ImageSource] = []

    def marked(part: Any) -> Any:
        if not isinstance(part, Mapping) or part.get("type") != "image" or "image" not in part:
            return part
        images.append(part["image"])
        return {"type": "image"}

    contents = (message.get("content") for message in messages)
    split = [
        {**message, "content": list(map(marked, content))} if isinstance(content, list | tuple) else message
        for message, content in zip(messages, contents, strict=True)
    ]
    return split, images


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
