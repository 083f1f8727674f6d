"""Observes attention and sequence mixers: the calls of a forward pass, and the outputs of the calling modules.

No model class is special-cased.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.execution.attention import AttentionSpec
from inflight.execution.hf.hook import attend_with, attention_sinks
from inflight.execution.hf.mixer_hook import hook_mixers, mix_with, watch_modules
from inflight.execution.hf.model_call import forward_parameters
from inflight.execution.mixing import MixerSpec, Recurrence, mix
from inflight.execution.pooling.states_model import gives_states
from inflight.execution.preparation.agreement import relative_error, rounded_again

_STATES = "hidden_states"
DRY_RUN_LENGTH = 160
"""Tokens of a dry forward pass: enough for compressed keys (DeepSeek-V4 makes one of every 128) to appear."""


class FoundCalls(NamedTuple):
    """A forward pass's calls that mix tokens.

    Attributes:
        specs: the attention calls, in order.
        mixers: the operators of other sequence mixers, in order.
        modules: those that make these calls, each once, without those within others.
    """

    specs: tuple[AttentionSpec, ...]
    mixers: tuple[MixerSpec, ...]
    modules: tuple[nn.Module, ...]


class _MixersFound:
    """Notes the operators that run, with outputs that are all zeros."""

    def __init__(self) -> None:
        self.specs: list[MixerSpec] = []

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """See `Operators`."""
        self.specs.append(MixerSpec(False, (weight.shape[1] - 1, x.shape[1])))
        return torch.zeros_like(x, memory_format=torch.contiguous_format)

    def recur(self, given: Recurrence) -> Tensor:
        """See `Operators`."""
        self.specs.append(given.spec)
        return given.value.new_zeros(given.value.shape, dtype=given.dtype)


@torch.inference_mode()
def find_calls(model: PreTrainedModel, num_tokens: int) -> FoundCalls:
    """Run a dry forward pass of `num_tokens` tokens; return the calls that mix tokens.

    Raises:
        ModelError: a packed row cannot replace the calls: there are none, or they have a mask, a position bias, keys
            from outside the row, or states of the model's own.
    """
    hook_mixers(model)
    mixers = _MixersFound()
    specs: list[AttentionSpec] = []
    modules: list[nn.Module] = []
    given: list[tuple[Tensor, Tensor]] = []  # keys and values of each call
    config = model.config.get_text_config()

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        if mask is not None or kwargs.get("position_bias") is not None:
            raise ModelError(f"{type(model).__name__} gives attention a mask or a position bias of its own making")
        if getattr(module, "is_causal", True) is False and not gives_states(model):
            raise ModelError(f"{type(model).__name__} reads a prompt in both directions")
        if key.shape[2] != query.shape[2]:
            raise ModelError(f"{type(model).__name__} attends to {key.shape[2]} keys for {query.shape[2]} tokens")
        owner = next((i for i, (keys, values) in enumerate(given) if keys is key and values is value), None)
        given.append((key, value))
        specs.append(replace(_attention_spec(module, query, key, value, kwargs, config), shares_cache_with=owner))
        note(module)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    def note(module: nn.Module) -> None:
        if module not in modules:
            modules.append(module)

    def record_mixer(name: str, *args: Any, **kwargs: Any) -> Any:
        note(running[-1])
        return mix(name, mixers, *args, **kwargs)

    positions = torch.arange(num_tokens, device=model.device)[None]
    options = {"position_ids": positions} if "position_ids" in forward_parameters(model) else {}
    with attend_with(record), mix_with(record_mixer), watch_modules(model) as running:
        model(input_ids=positions % num_embeddings(model), use_cache=False, **options)
    if not specs and not mixers.specs:
        raise ModelError(
            f"{type(model).__name__} does its attention itself instead of calling the attention function that it is "
            "given, so its sequences cannot be kept apart in a packed row"
        )
    inner = {each for module in modules for each in module.modules() if each is not module}
    return FoundCalls(tuple(specs), tuple(mixers.specs), tuple(each for each in modules if each not in inner))


def _attention_spec(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any], config: PreTrainedConfig
) -> AttentionSpec:
    """The spec of an attention call; see `AttentionHandler` for shapes."""
    scale = kwargs.get("scaling")
    layer_types = getattr(config, "layer_types", None) or ()
    layer = getattr(module, "layer_idx", None)
    layer_type = layer_types[layer] if layer is not None and layer < len(layer_types) else None
    return AttentionSpec(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_size=key.shape[-1],
        value_head_size=value.shape[-1],
        scale=float(scale) if scale is not None else float(key.shape[-1] ** -0.5),
        window=kwargs.get("sliding_window"),
        # Llama 4 passes its chunks only to its own mask.
        chunk=config.attention_chunk_size if layer_type == "chunked_attention" else None,
        softcap=kwargs.get("softcap"),
        has_sinks=attention_sinks(module, kwargs) is not None,
    )


class PlainAttention:
    """Inputs and outputs of attention modules in the reference run, for comparison with a packed row's.

    In the row each module gets the reference states, and its output is replaced by the reference's: so rounding does
    not accumulate over layers, and no router chooses otherwise.

    Args:
        modules: those that call attention.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self._calls: list[list[tuple[Tensor | None, Tensor]]] = []  # states and output of each call and prompt, [L, …]

    @contextmanager
    def recording(self, num_prompts: int) -> Iterator[None]:
        """A context in which the model runs this number of prompts as the reference, in one forward pass or one by
        one."""
        seen: list[tuple[Tensor | None, Tensor]] = []

        def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            states, outputs = args[0] if args else kwargs.get(_STATES), _first(output)
            is_by_token = isinstance(states, Tensor) and states.shape[:2] == outputs.shape[:2]
            seen.append((states if is_by_token else None, outputs))

        hooks = [module.register_forward_hook(observe, with_kwargs=True) for module in self.modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        num_calls = len(seen) * len(seen[0][1]) // num_prompts
        for number in range(num_calls):
            passes = seen[number::num_calls]
            rows = [(states, outputs, row) for states, outputs in passes for row in range(len(outputs))]
            self._calls.append([(None if states is None else states[row], own[row]) for states, own, row in rows])

    @contextmanager
    def in_row(self, pieces: Sequence[tuple[int, int, int]], rounds_again: bool = False) -> Iterator[list[Tensor]]:
        """A context in which the model runs one row of these pieces of the prompts, each as (prompt, start, end).
        Yields the modules' outputs, `[1, T, …]` in the model's dtype, in call order.

        Args:
            rounds_again: whether the reference states are rounded once more.
        """
        seen: list[Tensor] = []

        def give(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            states = self._plain(len(seen), 0, pieces)
            if states is None:
                return None
            states = rounded_again(states) if rounds_again else states
            return ((states, *args[1:]), kwargs) if args else (args, kwargs | {_STATES: states})

        def take(module: nn.Module, args: object, output: Any) -> Any:
            plain = self._plain(len(seen), 1, pieces)
            seen.append(_first(output))
            return (plain, *output[1:]) if isinstance(output, tuple) else plain

        hooks = [module.register_forward_pre_hook(give, with_kwargs=True) for module in self.modules]
        hooks += [module.register_forward_hook(take) for module in self.modules]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def errors(self, outputs: Sequence[Tensor], pieces: Sequence[tuple[int, int, int]]) -> list[float]:
        """The relative error of each output `[1, T, …]` of a row of these pieces, in call order, for calls that have a
        reference."""
        plain = (self._plain(number, 1, pieces) for number in range(len(outputs)))
        return [relative_error(own, each) for own, each in zip(outputs, plain, strict=True) if each is not None]

    def _plain(self, number: int, which: int, pieces: Sequence[tuple[int, int, int]]) -> Tensor | None:
        """The states (0) or the output (1) of a call, as a row `[1, T, …]` of pieces."""
        calls = self._calls[number]
        parts = [tensor[start:end] for prompt, start, end in pieces if (tensor := calls[prompt][which]) is not None]
        return torch.cat(parts)[None] if parts else None


def _first(output: Any) -> Tensor:
    """The first output `[…]` of a module."""
    states: Tensor = output[0] if isinstance(output, tuple) else output
    return states


def num_embeddings(model: PreTrainedModel) -> int:
    """Number of input token ids: the rows of the embedding."""
    return int(model.get_input_embeddings().weight.shape[0])
