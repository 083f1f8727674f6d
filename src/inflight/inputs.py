"""What callers give, and what the fronts make of it: models, tokenizers, options, prompts.

Decides what counts as each of these. Knows no request: admission says whether a prompt can run.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import InvalidRequestError, ModelError
from inflight.contracts.options import refuse_unknown_options
from inflight.demo_model import DEMO_MODEL
from inflight.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict with "prompt", "prompt_token_ids" or "messages" (and "cache_salt", if it has one)."""

Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A chat: dicts with "role" and "content"."""

TokenizerSource: TypeAlias = str | os.PathLike[str] | PreTrainedTokenizerBase

TEMPLATE_OPTIONS = {"chat_template", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
"""What a prompt may have besides its messages, for the chat template."""


def engine_config(options: Mapping[str, Any], owner: str) -> EngineConfig:
    """A front's options as a configuration. Raises `ValueError` if one is unknown or out of range."""
    refuse_unknown_options(options, [field.name for field in fields(EngineConfig)], owner)
    options = dict(options)
    for name in ("dtype", "device"):  # torch.bfloat16 and torch.device("cuda") are accepted, too
        if isinstance(options.get(name), torch.dtype | torch.device):
            options[name] = str(options[name]).removeprefix("torch.")
    return EngineConfig(**options)


def model_source(model: object) -> str | PreTrainedModel:
    """A hub id, a folder with `~` expanded, or a loaded model; None is the embedded model. Raises `ModelError` for
    anything else."""
    if model is None:
        return str(DEMO_MODEL)
    if isinstance(model, PreTrainedModel):
        return model
    if isinstance(model, str | os.PathLike):
        return os.path.expanduser(os.fspath(model))
    raise ModelError(
        f"the model is a {type(model).__name__}; it must be a hub id, a folder, or a transformers PreTrainedModel"
    )


def load_tokenizer(
    model: str | PreTrainedModel, tokenizer: TokenizerSource | None, config: EngineConfig
) -> Tokenizer | None:
    """The tokenizer that was given, else the one that comes with the model; None if there is none. Raises
    `ModelError`."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return Tokenizer(tokenizer)
    if tokenizer is None and isinstance(model, PreTrainedModel):
        return None
    source = model if tokenizer is None else tokenizer
    if not isinstance(source, str | os.PathLike):
        raise ModelError(f"the tokenizer is a {type(source).__name__}; it must be a hub id, a folder, or a loaded one")
    name = os.path.expanduser(os.fspath(source))
    loaded = Tokenizer.load(name, trust_remote_code=config.trust_remote_code, revision=config.revision)
    if loaded is None and tokenizer is not None:
        raise ModelError(f"there is no tokenizer in {name!r}")
    return loaded


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, Sequence[int], str | None]:
    """A prompt's text, if it has one, its token ids, and its cache salt. Raises `InvalidRequestError`."""
    if isinstance(prompt, str):
        if not prompt:  # even if the tokenizer would add tokens
            raise InvalidRequestError("the prompt is empty; it must have at least one character")
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
            options = {name: prompt[name] for name in prompt if name in TEMPLATE_OPTIONS}
            return None, _needed(tokenizer, "a chat").chat(_messages(prompt["messages"]), **options), salt
        return *read_prompt(prompt[kind], tokenizer)[:2], salt
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
        return None, prompt, None
    raise InvalidRequestError(f"the prompt is a {type(prompt).__name__}; it must be text, token ids, or a dict")


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


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidRequestError(f"messages is {messages!r}; a chat is a list of dicts with a role and a content")
    return [dict(message) for message in messages]
