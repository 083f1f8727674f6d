"""Options that several sub-commands share, with their help texts; and `quiet_libraries`.

An option that is not given is None and left to `EngineConfig` and `SamplingParams`, so each default is written only
once.
"""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from inflight.contracts import config
from inflight.contracts.params import SamplingParams

Command = TypeVar("Command", bound=Callable[..., Any])


def _one_of(name: str, values: tuple[str, ...], meaning: str) -> Callable[[Command], Command]:
    return click.option(name, type=click.Choice(values), help=meaning)


_TOKENIZER = (click.option("--tokenizer", help="Hub id or folder of the tokenizer, if it is not the model's own."),)
_LOADING = (
    _one_of("--dtype", config.DTYPES, "Dtype of weights, activations and cache."),
    click.option("--device", help="auto (CUDA, else MPS, else CPU), or a device such as cuda:1."),
    _one_of("--load-format", config.LOAD_FORMATS, "dummy: random weights, made from the config."),
    click.option("--trust-remote-code", is_flag=True, default=None, help="Allow code that comes with the model."),
    click.option("--revision", help="Branch, tag or commit of a hub repository."),
    _one_of("--executor", config.EXECUTORS, "How the model is run; it is proved in any case."),
    _one_of("--attention-backend", config.ATTENTION_BACKENDS, "How attention is computed."),
    _one_of("--kv-cache-dtype", config.KV_CACHE_DTYPES, "Dtype of keys and values: the model's, or int8."),
    _one_of("--quantization", config.QUANTIZATIONS, "Quantize weights while loading."),
    _one_of("--compile", config.COMPILE_MODES, "Use torch.compile: starts later, runs faster."),
)
_SCHEDULING = (
    click.option("--max-model-len", type=int, help="Most tokens of a sequence, prompt and output together."),
    click.option("--max-num-seqs", type=int, help="Most sequences that run at once: the number of slots."),
    click.option("--max-num-batched-tokens", type=int, help="Most tokens in a step; longer prompts run in chunks."),
    click.option("--max-prefill-tokens-per-step", type=int, help="Most prefill tokens in a step that has decodes."),
    _one_of("--policy", config.POLICIES, "Which requests are served first."),
    click.option("--aging-steps", type=int, help="Steps after which a request's priority improves by one."),
    click.option("--max-num-waiting", type=int, help="Most sequences that may wait; more are refused."),
    click.option(
        "--enable-prefix-caching/--no-prefix-caching",
        default=None,
        help="Reuse cached blocks of common prompt prefixes.",
    ),
    click.option("--block-size", type=int, help="Tokens in a block of the cache."),
    click.option("--num-blocks", type=int, help="Blocks in the cache; default: as many as fit into memory."),
)
_CACHE_MEMORY = (click.option("--kv-cache-memory", type=int, help="Bytes for keys and values."),)
_CONFIG = _LOADING + _SCHEDULING + _CACHE_MEMORY
_CHOICE = (
    click.option("--temperature", type=float, help="0 always takes the most likely token."),
    click.option("--top-p", type=float, help="Keep the likeliest tokens whose probabilities reach this sum."),
    click.option("--top-k", type=int, help="Keep the k likeliest tokens; 0 keeps all."),
    click.option("--min-p", type=float, help="Drop tokens below this fraction of the likeliest one's probability."),
    click.option("--seed", type=int, help="Seed of the random numbers."),
)
_SAMPLING = (
    click.option("--n", type=int, help="Sequences to generate for each prompt."),
    click.option("--max-tokens", type=int, help="Most tokens to generate; default: until a stop or a full context."),
    click.option("--min-tokens", type=int, help="Fewest tokens before a stop."),
    *_CHOICE,
    click.option("--stop", multiple=True, help="A string that ends the text; may be repeated."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Continue past the model's end tokens."),
    click.option("--truncate-prompt-tokens", type=int, help="Keep only this many tokens from a prompt's end."),
)


def _together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return a decorator that adds several options to a command."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


engine_options = _together(*_TOKENIZER, *_CONFIG)
"""Options for loading and batching: those that `LLM` takes."""

config_options = _together(*_CONFIG)
"""The same without a tokenizer: those that `EngineConfig` takes."""

scheduling_options = _together(*_SCHEDULING)
"""Those of `EngineConfig`'s options that say how requests are batched."""

choice_options = _together(*_CHOICE)
"""Options for how tokens are chosen."""

sampling_options = _together(*_SAMPLING)
"""Options for how tokens are chosen and when a sequence ends."""


def engine_values(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of a command's given options that are for `LLM` or `EngineConfig`."""
    return _given(options, {"tokenizer", *(field.name for field in fields(config.EngineConfig))} - {"seed"})


def sampling_values(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of a command's given options that are for `SamplingParams`."""
    return values_for(SamplingParams, options)


def values_for(owner: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return those of a command's given options that are fields of `owner`, a dataclass."""
    return _given(options, {field.name for field in fields(owner)})


def quiet_libraries() -> None:
    """Keep other libraries' messages off standard error, except, in a terminal, the progress bar of a large model."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.WARNING, format="inflight: %(message)s", stream=sys.stderr)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _given(options: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names and value not in (None, ())}
