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
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from inflight.cli.help import Option
from inflight.contracts import config
from inflight.contracts.params import SamplingParams

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
        type: the type of its value; None: it is a switch.
        help: its meaning.
        unset: the effective default, in words, if neither caller nor field has a value.
        field: the field that it sets, if named differently.
    """

    flag: str
    type: Any
    help: str
    unset: str = ""
    field: str | None = None
    multiple: bool = False

    def under(self, heading: str, defaults: Mapping[str, Any]) -> Options[Any]:
        """The option as a decorator; `defaults` are shown, and apply because the option's own value is None."""
        name = self.field or self.flag.split("/")[0].removeprefix("--").replace("-", "_")
        default = defaults.get(name)
        shown = self.unset if default is None else {"True": "on", "False": ""}.get(str(default), str(default))
        text = f"{self.help}  [default: {shown}]" if shown else self.help
        attributes: dict[str, Any] = {"is_flag": True, "default": None} if self.type is None else {"type": self.type}
        if self.multiple:
            attributes["multiple"] = True
        return click.option(
            *self.flag.split(), name, cls=Option, heading=heading, help=text, show_default=False, **attributes
        )


def _one_of(flag: str, values: tuple[str, ...], meaning: str, unset: str = "") -> Shared:
    return Shared(flag, click.Choice(values), meaning, unset)


MODEL, RUNNING, BATCHING, CACHE = "Model", "How the model runs", "Batching", "Cache"
CHOOSING, ENDING, STRUCTURE = "How tokens are chosen", "How much is generated", "What the output must be"

_TOKENIZER = (Shared("--tokenizer", str, "Hub id or folder of the tokenizer.", "the model's own"),)
_LOADING = (
    Shared("--revision", str, "Branch, tag or commit of a hub repository.", "main"),
    _one_of("--load-format", config.LOAD_FORMATS, "auto: the checkpoint's weights. dummy: random ones."),
    _one_of("--task", config.TASKS, "The model's task. auto: from the checkpoint."),
    Shared("--trust-remote-code", None, "Allow code that comes with the model."),
)
_RUNNING = (
    _one_of("--dtype", config.DTYPES, "Of weights, activations and cache. auto: the checkpoint's own."),
    Shared(
        "--threads --num-threads",
        int,
        "Threads that compute a step.",
        "one for each core it may use",
        field="num_threads",
    ),
    Shared("--device", str, "auto (CUDA, else MPS, else CPU), or a device such as cuda:1."),
    _one_of("--quantization", config.QUANTIZATIONS, "Quantize weights while loading.", "none"),
    Shared("--quantization-group-size", int, "Of int4: weights that share a scale: 32, 64 or 128."),
    Shared("--quantization-minima", None, "Of int4: a minimum for them, too."),
    _one_of("--quantization-arithmetic", config.ARITHMETICS, "Arithmetic of quantized weights."),
    Shared("--record-forward/--no-record-forward", None, "Run the forward pass as a graph, without Python."),
    _one_of("--kv-cache-dtype", config.KV_CACHE_DTYPES, "Of keys and values. auto: the model's."),
    _one_of("--executor", config.EXECUTORS, "How steps run. auto: the first executor proved exact."),
    _one_of("--attention-backend", config.ATTENTION_BACKENDS, "The attention backend. auto: the best one here."),
)
_BATCHING = (
    Shared(
        "--max-model-len",
        int,
        "Most tokens of a sequence, prompt and output together.",
        "what the model was made for",
    ),
    Shared("--max-num-seqs", int, "Most sequences that run at once: the number of slots."),
    Shared("--max-num-batched-tokens", int, "Most tokens in a step; longer prompts run in chunks."),
    Shared(
        "--max-prefill-tokens-per-step",
        int,
        "Most prefill tokens in a step that has decodes, or is in the background.",
        "no limit; a server derives one from step times",
    ),
    _one_of("--policy", config.POLICIES, "Which requests are served first."),
    Shared("--aging-steps", int, "Steps after which a request's priority improves by one."),
    Shared("--background-tokens-per-step", int, "Most tokens of batch jobs in a step that has others."),
    _one_of("--speculation", config.SPECULATIONS, "Which drafters propose draft tokens; results stay the same."),
    Shared("--draft-model", str, "A small draft model: hub id or folder; mtp: the checkpoint's own layer.", "none"),
    Shared("--max-draft-tokens", int, "Most draft tokens of a sequence in a step."),
    Shared("--max-num-waiting", int, "Most sequences that may wait; more are refused.", "no limit"),
)
_BLOCKS = (
    Shared(
        "--enable-prefix-caching/--no-prefix-caching",
        None,
        "Reuse cached blocks of common prompt prefixes.",
    ),
    Shared("--block-size", int, "Tokens in a block of the cache."),
    Shared("--num-blocks", int, "Blocks in the cache.", "as many as fit into --kv-cache-memory"),
)
_CACHE_MEMORY = (
    Shared(
        "--kv-cache-memory",
        size,
        "Memory for keys and values in bytes, such as 2G or 512MiB.",
        "a quarter of this machine's, 90 % of a GPU's",
    ),
    Shared("--prefix-cache-dir", str, "A folder that keeps prefixes across restarts.", "none"),
    Shared("--prefix-cache-size", size, "Its most bytes, such as 20G.", "20G"),
)
_CHOOSING = (
    Shared("--temperature", float, "0 always takes the most likely token."),
    Shared("--top-p", float, "Keep the likeliest tokens whose probabilities reach this sum."),
    Shared("--top-k", int, "Keep the k likeliest tokens; 0 keeps all."),
    Shared("--min-p", float, "Drop tokens below this share of the likeliest one's probability."),
    Shared("--seed", int, "Seed of the random numbers.", "differs from request to request"),
)
_CHANGING = (
    Shared("--presence-penalty", float, "Subtracted from the logits of tokens in the output."),
    Shared("--frequency-penalty", float, "The same, for each occurrence in the output."),
    Shared("--repetition-penalty", float, "Divides the logits of tokens in prompt or output."),
    Shared("--bad-word", str, "A text that is never generated; may be repeated.", field="bad_words", multiple=True),
)
_NUMBER = (Shared("--n", int, "Sequences to generate for each prompt."),)
_ENDING = (
    Shared("--max-tokens", int, "Most tokens to generate.", "until a stop or a full context"),
    Shared("--min-tokens", int, "Fewest tokens before a stop."),
    Shared("--stop", str, "A string that ends the text; may be repeated.", multiple=True),
    Shared(
        "--stop-token-id",
        int,
        "A token id that ends the sequence; may be repeated.",
        field="stop_token_ids",
        multiple=True,
    ),
    Shared("--ignore-eos", None, "Continue past the model's end tokens."),
    Shared("--truncate-prompt-tokens", int, "Keep only this many tokens from a prompt's end.", "all"),
)
_SCORES = (
    Shared("--logprobs", int, "Report log-probabilities: each token's own, and this many of the likeliest.", "none"),
    Shared("--prompt-logprobs", int, "The same for the prompt's tokens.", "none"),
)
_STRUCTURE = (
    Shared("--json-schema", str, "JSON that this schema accepts: a file, or the schema itself."),
    Shared("--json-object", None, "Any JSON object."),
    Shared("--regex", str, "Text that this regular expression matches as a whole."),
    Shared("--choice", str, "One of these texts; repeat it for each.", multiple=True),
    Shared("--grammar", str, "Text of this grammar (Lark or GBNF): a file, or the grammar itself."),
)

_OF_ENGINE = {field.name: field.default for field in fields(config.EngineConfig)}
_OF_SAMPLING = {field.name: field.default for field in fields(SamplingParams)} | {"max_tokens": None}
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
    """Add options for adapters, by name."""
    memory = Shared("--adapter-memory", size, "Memory of unused adapters in bytes, such as 2G.")
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
    "--replicas", replicas, "Engines of the model, each on its own cores; auto: one per NUMA node."
).under(RUNNING, {"replicas": 1})
"""For commands whose front can have several engines."""


tensor_parallel_option = Shared(
    "--tensor-parallel-size -tp",
    click.IntRange(1, config.MAX_RANKS),
    "Tensor parallelism: processes that each have a shard of every weight.",
    field="tensor_parallel_size",
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
    of_config = {field.name for field in fields(config.EngineConfig)}
    return _given(options, {"tokenizer", "replicas", *of_config} - {"seed"})


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
