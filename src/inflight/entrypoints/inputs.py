"""Reads prompts into token ids. Knows no request: admission decides whether a prompt can run."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from inflight.contracts.api.errors import InvalidRequestError, ModelError
from inflight.contracts.api.options import is_loaded_model
from inflight.contracts.api.params import SamplingParams
from inflight.demo_model import DEMO_MODEL
from inflight.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict with "prompt", "prompt_token_ids" or "messages" (and "cache_salt", if it has one)."""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A chat: dicts with "role" and "content"."""

TEMPLATE_OPTIONS = {"chat_template", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
"""Keyword arguments for the chat template."""


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, Sequence[int], str | None]:
    """A prompt's text, if it has one, its token ids, and its cache salt. Raises `InvalidRequestError`."""
    if isinstance(prompt, str):
        if not prompt:  # even if the tokenizer would add tokens
            raise InvalidRequestError("the prompt is empty; it must have at least one character")
        _check_text(prompt)
        return prompt, _needed(tokenizer, "text").encode(prompt), None
    if isinstance(prompt, Mapping):
        kind = next((key for key in ("prompt", "prompt_token_ids", "messages") if key in prompt), None)
        extra = set(prompt) - {kind, "cache_salt"} - (TEMPLATE_OPTIONS if kind == "messages" else set())
        if kind is None or extra:
            raise InvalidRequestError(
                'a prompt given as a dict must have the key "prompt", "prompt_token_ids" or "messages" and no '
                f'other but "cache_salt"; it has {sorted(map(str, prompt))}'
            )
        salt = prompt.get("cache_salt")
        if kind == "messages":
            return None, _needed(tokenizer, "a chat").chat(_messages(prompt["messages"]), **_options(prompt)), salt
        return *read_prompt(prompt[kind], tokenizer)[:2], salt
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
        return None, prompt, None
    raise InvalidRequestError(f"the prompt is a {type(prompt).__name__}; it must be text, token ids, or a dict")


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
