"""Options that several sub-commands share, with their help texts; and `quiet_libraries`.

Options not given are None and left to `EngineConfig` and `SamplingParams`, which have each default once; help texts
show it.
"""

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource

from inflight.cli.help import Option
from inflight.contracts.api import config
from inflight.contracts.api.options import base_of, flat_options
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.api.structured_output import StructuredOutput

Command = TypeVar("Command", bound=Callable[..., Any])
Options = Callable[[Command], Command]
"""A decorator that adds options to a command."""


def size(text: str) -> int:
    """A number of bytes: 1000000, 2G or 2GiB (1024 each), 2GB (1000 each). Raises `click.BadParameter`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?B)?|B)?", text.strip(), re.IGNORECASE)
    if match is None:
        message = f"{text!r} is not a size; give bytes, or a number with a unit, such as 2G, 512MiB or 1.5GB"
        raise click.BadParameter(message)
    base = 1000 if (match[3] or "").upper() == "B" else 1024
    return int(float(match[1]) * base ** " KMGT".index((match[2] or " ").upper()))


def replicas(text: str) -> int | str:
    """A number of engines, or "auto". Raises `click.BadParameter`."""
    if text != "auto" and not re.fullmatch(r"[1-9]\d{0,3}", text):
        raise click.BadParameter(f"{text!r} is no number of engines; give one, or auto")
    return text if text == "auto" else int(text)


def tokens(text: str) -> tuple[int, ...]:
    """Most tokens of prompts: one number for all, or one for each. Raises `click.BadParameter`."""
    if not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text):
        raise click.BadParameter(f"{text!r} are no numbers of tokens; give one, or one for each prompt, such as 4,8,12")
    return tuple(map(int, text.split(",")))


def one_each(caps: tuple[int, ...], num_prompts: int) -> tuple[int, ...]:
    """`--max-tokens` for each prompt. Raises `click.UsageError`."""
    if len(caps) not in (1, num_prompts):
        noun = "prompt" if num_prompts == 1 else "prompts"
        raise click.UsageError(f"--max-tokens has {len(caps)} numbers for {num_prompts} {noun}")
    return caps if len(caps) == num_prompts else caps * num_prompts


@dataclass(frozen=True, slots=True)
class Shared:
    """An option of several commands that sets one field.

    Attributes:
        flag: its name, or several with a space between them; the names of both directions of a switch have a slash.
        help: its meaning.
        unset: what applies if neither caller nor field has a value, in words.
        field: the field that it sets, if it is not named like the option.
        type: what its text becomes; None: what the field's annotation says.
        multiple: whether it may be repeated.
    """

    flag: str
    help: str
    unset: str = ""
    field: str | None = None
    type: Any = None
    multiple: bool = False

    def under(self, heading: str, defaults: Mapping[str, Any]) -> Options[Any]:
        """The option as a decorator; `defaults` are shown, and apply because the option's own value is None."""
        name = self.field or self.flag.split("/")[0].removeprefix("--").replace("-", "_")
        default = defaults.get(name)
        shown = self.unset if default is None else {"True": "on", "False": ""}.get(str(default), str(default))
        text = f"{self.help}  [default: {shown}]" if shown else self.help
        kind = self.type or (_kind(_OPTIONS[name].kind) if name in _OPTIONS else str)
        attributes: dict[str, Any] = {"is_flag": True, "default": None} if kind is bool else {"type": kind}
        if self.multiple:
            attributes["multiple"] = True
        return click.option(
            *self.flag.split(), name, cls=Option, heading=heading, help=text, show_default=False, **attributes
        )


def _kind(annotation: Any) -> Any:
    """What an option's text becomes: a plain type, or one of several words."""
    base, _ = base_of(annotation)
    if get_origin(base) is not Literal:
        return base if base in (bool, int, float) else str
    words = get_args(base)
    return click.Choice(words) if isinstance(words[0], str) else type(words[0])


_OPTIONS = {**flat_options(StructuredOutput), **flat_options(SamplingParams), **flat_options(config.EngineConfig)}
_OF_ENGINE = {name: option.default for name, option in flat_options(config.EngineConfig).items()}
_OF_SAMPLING = {name: option.default for name, option in flat_options(SamplingParams).items()} | {"max_tokens": None}
MODEL, RUNNING, BATCHING, CACHE = "Model", "How the model runs", "Batching", "Cache"
CHOOSING, ENDING, STRUCTURE = "How tokens are chosen", "How much is generated", "What the output must be"

_TOKENIZER = (Shared("--tokenizer", "Hub id or folder of the tokenizer.", "the model's own"),)
_LOADING = (
    Shared("--revision", "Branch, tag or commit of a hub repository.", "main"),
    Shared("--load-format", "auto: the checkpoint's weights. dummy: random ones."),
    Shared("--task", "The model's task. auto: from the checkpoint."),
    Shared("--trust-remote-code", "Allow code that comes with the model."),
)
_RUNNING = (
    Shared("--dtype", "Of weights, activations and cache. auto: the checkpoint's own."),
    Shared(
        "--threads --num-threads",
        "Threads that compute a step.",
        "one for each core it may use",
        field="num_threads",
    ),
    Shared("--device", "auto (CUDA, else MPS, else CPU), or a device such as cuda:1."),
    Shared("--quantization", "Quantize weights while loading.", "none"),
    Shared("--quantization-group-size", "Of int4: weights that share a scale: 32, 64 or 128."),
    Shared("--quantization-minima", "Of int4: a minimum for them, too."),
    Shared("--quantization-arithmetic", "Arithmetic of quantized weights."),
    Shared("--record-forward/--no-record-forward", "Run the forward pass as a graph, without Python."),
    Shared("--kv-cache-dtype", "Of keys and values. auto: the model's."),
    Shared("--executor", "How steps run. auto: the first executor proved exact."),
    Shared("--attention-backend", "The attention backend. auto: the best one here."),
)
_BATCHING = (
    Shared(
        "--max-model-len",
        "Most tokens of a sequence, prompt and output together.",
        "what the model was made for",
    ),
    Shared("--max-num-seqs", "Most sequences that run at once: the number of slots."),
    Shared("--max-num-batched-tokens", "Most tokens in a step; longer prompts run in chunks."),
    Shared(
        "--max-prefill-tokens-per-step",
        "Most prefill tokens in a step that has decodes, or is in the background.",
        "no limit; a server derives one from step times",
    ),
    Shared("--policy", "Which requests are served first."),
    Shared("--aging-steps", "Steps after which a request's priority improves by one."),
    Shared("--background-tokens-per-step", "Most tokens of batch jobs in a step that has others."),
    Shared("--speculation", "Which drafters propose draft tokens; results stay the same."),
    Shared("--draft-model", "A small draft model: hub id or folder; mtp: the checkpoint's own layer.", "none"),
    Shared("--max-draft-tokens", "Most draft tokens of a sequence in a step."),
    Shared("--max-num-waiting", "Most sequences that may wait; more are refused.", "no limit"),
)
_BLOCKS = (
    Shared(
        "--enable-prefix-caching/--no-prefix-caching",
        "Reuse cached blocks of common prompt prefixes.",
    ),
    Shared("--prefix-retention", "Most seconds for which blocks are kept for an agent's next turn; 0: never."),
    Shared("--block-size", "Tokens in a block of the cache."),
    Shared("--num-blocks", "Blocks in the cache.", "as many as fit into --kv-cache-memory"),
)
_CACHE_MEMORY = (
    Shared(
        "--kv-cache-memory",
        "Memory for keys and values in bytes, such as 2G or 512MiB.",
        "a quarter of this machine's, 90 % of a GPU's",
        type=size,
    ),
    Shared("--prefix-cache-dir", "A folder that keeps prefixes across restarts.", "none"),
    Shared("--prefix-cache-size", "Its most bytes, such as 20G.", "20G", type=size),
)
_CHOOSING = (
    Shared("--temperature", "0 always takes the most likely token."),
    Shared("--top-p", "Keep the likeliest tokens whose probabilities reach this sum."),
    Shared("--top-k", "Keep the k likeliest tokens; 0 keeps all."),
    Shared("--min-p", "Drop tokens below this share of the likeliest one's probability."),
    Shared("--seed", "Seed of the random numbers.", "differs from request to request"),
)
_CHANGING = (
    Shared("--presence-penalty", "Subtracted from the logits of tokens in the output."),
    Shared("--frequency-penalty", "The same, for each occurrence in the output."),
    Shared("--repetition-penalty", "Divides the logits of tokens in prompt or output."),
    Shared("--bad-word", "A text that is never generated; may be repeated.", field="bad_words", multiple=True),
)
_NUMBER = (Shared("--n", "Sequences to generate for each prompt."),)
_ENDING = (
    Shared("--max-tokens", "Most tokens to generate.", "until a stop or a full context"),
    Shared("--min-tokens", "Fewest tokens before a stop."),
    Shared("--stop", "A string that ends the text; may be repeated.", multiple=True),
    Shared(
        "--stop-token-id",
        "A token id that ends the sequence; may be repeated.",
        field="stop_token_ids",
        type=int,
        multiple=True,
    ),
    Shared("--ignore-eos", "Continue past the model's end tokens."),
    Shared("--truncate-prompt-tokens", "Keep only this many tokens from a prompt's end.", "all"),
)
_SCORES = (
    Shared("--logprobs", "Report log-probabilities: each token's own, and this many of the likeliest.", "none"),
    Shared("--prompt-logprobs", "The same for the prompt's tokens.", "none"),
)
_STRUCTURE = (
    Shared("--json-schema", "JSON that this schema accepts: a file, or the schema itself."),
    Shared("--json-object", "Any JSON object."),
    Shared("--regex", "Text that this regular expression matches as a whole."),
    Shared("--choice", "One of these texts; repeat it for each.", multiple=True),
    Shared("--grammar", "Text of this grammar (Lark or GBNF): a file, or the grammar itself."),
)

_OF_MODEL = _OF_SAMPLING | {
    name: f"the model's own, else {_OF_SAMPLING[name]}" for name in ("temperature", "top_p", "top_k", "min_p")
}
_SCHEDULING = ((BATCHING, _BATCHING), (CACHE, _BLOCKS))
_CONFIG = (
    (MODEL, _LOADING),
    (RUNNING, _RUNNING),
    (BATCHING, _BATCHING),
    (CACHE, _BLOCKS + _CACHE_MEMORY),
)


def _together(defaults: Mapping[str, Any], *groups: tuple[str, tuple[Shared, ...]]) -> Options[Any]:
    """A decorator that adds several options to a command, under their headings."""

    def add(command: Command) -> Command:
        for heading, options in reversed(groups):
            for option in reversed(options):
                command = option.under(heading, defaults)(command)
        return command

    return add


def _adapters(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, str] | None:
    """Names and folders from NAME=PATH. Raises `click.BadParameter`."""
    adapters: dict[str, str] = {}
    for each in given:
        name, equals, source = each.partition("=")
        if not (name and equals and source):
            raise click.BadParameter(f"{each!r} is no adapter; give NAME=PATH")
        if name in adapters:
            raise click.BadParameter(f"there are two adapters {name!r}")
        adapters[name] = source
    return adapters or None


def adapters_option(command: Command) -> Command:
    """Add options for the adapters that requests may ask for, each by its name."""
    memory = Shared(
        "--adapter-memory", type=size, help="Bytes of adapters in memory that no request has, or such as 2G."
    )
    command = memory.under(MODEL, {"adapter_memory": "1G"})(command)
    return click.option(
        "--adapter",
        "adapters",
        cls=Option,
        heading=MODEL,
        multiple=True,
        callback=_adapters,
        metavar="NAME=PATH",
        help="A LoRA adapter, served as a model of this name; may be repeated.",
    )(command)


def adapter_option(command: Command) -> Command:
    """Add `--adapter`, for commands whose requests all have the same."""
    return click.option(
        "--adapter", cls=Option, heading=MODEL, help="A LoRA adapter: folder or hub id.  [default: none]"
    )(command)


engine_options = _together(_OF_ENGINE, (MODEL, _TOKENIZER), *_CONFIG)
"""Options for loading and batching: those that `LLM` takes."""


replicas_option = Shared(
    "--replicas", "Engines of the model, each on its own cores; auto: one per NUMA node.", type=replicas
).under(RUNNING, {"replicas": 1})
"""For commands whose front can have several engines."""


tensor_parallel_option = Shared(
    "--tensor-parallel-size -tp",
    "Tensor parallelism: processes that each have a shard of every weight.",
    field="tensor_parallel_size",
    type=click.IntRange(1, config.MAX_RANKS),
).under(RUNNING, {"tensor_parallel_size": 1})
"""For commands whose engine runs in its own process."""


def engine_options_with(**defaults: Any) -> Options[Any]:
    """The same for a command with its own defaults."""
    return _together(_OF_ENGINE | defaults, (MODEL, _TOKENIZER), *_CONFIG)


def config_options_with(**defaults: Any) -> Options[Any]:
    """The same without a tokenizer: those that `EngineConfig` takes."""
    return _together(_OF_ENGINE | defaults, *_CONFIG)


scheduling_options = _together(dict.fromkeys(_OF_ENGINE, "the recording's"), *_SCHEDULING)
"""The batching options of `EngineConfig`, whose defaults come from a recording."""

choice_options = _together(_OF_SAMPLING | {"temperature": 0}, (CHOOSING, _CHOOSING))
"""Sampling options; greedy by default."""

chat_options = _together(_OF_MODEL, (CHOOSING, _CHOOSING + _CHANGING), (ENDING, _ENDING))
"""Sampling and stopping options of one answer."""

sampling_options = _together(
    _OF_MODEL, (CHOOSING, _CHOOSING + _CHANGING), (ENDING, _NUMBER + _ENDING + _SCORES), (STRUCTURE, _STRUCTURE)
)
"""All options that `SamplingParams` has here."""


def model_option(command: Command) -> Command:
    """Add `--model`. Its value is None for the embedded model."""
    return click.option(
        "--model",
        "-m",
        cls=Option,
        heading=MODEL,
        help="Hub id, folder or GGUF file of the model.  [default: the small embedded model]",
    )(command)


def model_argument(command: Command) -> Command:
    """Add `--model`, and an equivalent argument, to a command without other arguments."""

    @click.argument("model_argument", metavar="[MODEL]", required=False)
    @model_option
    @functools.wraps(command)
    def with_model(*args: Any, model: str | None, model_argument: str | None, **options: Any) -> Any:
        source = click.get_current_context().get_parameter_source("model")
        if model is not None and model_argument is not None and source is not ParameterSource.COMMANDLINE:
            model = None  # from a file, or a variable
        if model is not None and model_argument is not None:
            raise click.UsageError(f"there are two models: {model_argument!r}, and {model!r} with --model")
        return command(*args, model=model_argument if model is None else model, **options)

    return with_model  # type: ignore[return-value]


def engine_values(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of a command's given options that are for `LLM` or `EngineConfig`."""
    return _given(options, {"tokenizer", "replicas", *_OF_ENGINE} - {"seed"})


def sampling_values(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of a command's given options that are for `SamplingParams`; `--speculation` is the engine's."""
    return values_for(SamplingParams, {name: value for name, value in options.items() if name != "speculation"})


def values_for(owner: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return those of a command's given options that are fields of `owner`, a dataclass."""
    return _given(options, {field.name for field in fields(owner)})


def quiet_libraries() -> None:
    """Keep other libraries' messages off standard error, except, in a terminal, the progress bar of a large model."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.basicConfig(level=logging.WARNING, format="inflight: %(message)s", stream=sys.stderr)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import huggingface_hub.utils.logging  # adds its own handler beside ours, which duplicates every message

    logging.getLogger(huggingface_hub.__name__).handlers.clear()


def _given(options: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names and value not in (None, ())}
