"""Watching attention: which calls a forward pass makes, and what the modules that make them return.

No class is known by its name.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from inflight.contracts.errors import ModelError
from inflight.execution.attention import AttentionSpec
from inflight.execution.hf.hook import attend_with, attention_sinks

DRY_RUN_LENGTH = 160
"""Tokens of a dry forward pass: enough for compressed keys (DeepSeek-V4 makes one of every 128) to appear."""


@torch.inference_mode()
def find_attention_calls(
    model: PreTrainedModel, num_tokens: int
) -> tuple[tuple[AttentionSpec, ...], tuple[nn.Module, ...]]:
    """Run a dry forward pass of `num_tokens` tokens; return the spec of each attention call in order, and the modules
    that make these calls, each once.

    Raises:
        ModelError: no packed row can replace the calls: there are none, or they come with a mask, a position bias, or
            other keys than those of the row.
    """
    specs: list[AttentionSpec] = []
    modules: list[nn.Module] = []
    given: list[tuple[Tensor, Tensor]] = []  # keys and values of each call
    config = model.config.get_text_config()

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        if mask is not None or kwargs.get("position_bias") is not None:
            raise ModelError(f"{type(model).__name__} gives attention a mask or a position bias of its own making")
        if key.shape[2] != query.shape[2]:
            raise ModelError(f"{type(model).__name__} attends to {key.shape[2]} keys for {query.shape[2]} tokens")
        owner = next((i for i, (keys, values) in enumerate(given) if keys is key and values is value), None)
        given.append((key, value))
        specs.append(replace(_attention_spec(module, query, key, value, kwargs, config), shares_cache_with=owner))
        if module not in modules:
            modules.append(module)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    positions = torch.arange(num_tokens, device=model.device)[None]
    with attend_with(record):
        model(input_ids=positions % num_embeddings(model), position_ids=positions, use_cache=False)
    if not specs:
        raise ModelError(
            f"{type(model).__name__} does its attention itself instead of calling the attention function that it is "
            "given, so its sequences cannot be kept apart in a packed row"
        )
    return tuple(specs), tuple(modules)


def _attention_spec(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any], config: PreTrainedConfig
) -> AttentionSpec:
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
        # Llama 4 tells its chunks only to the mask that it would make for itself.
        chunk=config.attention_chunk_size if layer_type == "chunked_attention" else None,
        softcap=kwargs.get("softcap"),
        has_sinks=attention_sinks(module, kwargs) is not None,
    )


@contextmanager
def watch_outputs(modules: Sequence[nn.Module], substitutes: Sequence[Tensor] | None = None) -> Iterator[list[Tensor]]:
    """Collect what `modules` return in a forward pass of B rows: `[B, T, …]` for each of their calls, in order.

    Args:
        substitutes: what to pass on instead, `[T, …]` for each call; only for one row.
    """
    seen: list[Tensor] = []

    def collect(module: nn.Module, args: object, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        seen.append(states)
        if substitutes is None:
            return None
        substitute = substitutes[len(seen) - 1][None]
        return (substitute, *output[1:]) if isinstance(output, tuple) else substitute

    hooks = [module.register_forward_hook(collect) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def num_embeddings(model: PreTrainedModel) -> int:
    """How many token ids can be fed: the rows of the input embedding."""
    return int(model.get_input_embeddings().weight.shape[0])
