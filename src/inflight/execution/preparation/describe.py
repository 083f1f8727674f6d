"""`describe`: makes a model's `ModelInfo`; decides its context length and cache size.

Storage formats of a prepacked model's weights.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.contracts.api.features import MULTIMODAL, Features
from inflight.contracts.api.model_info import ModelInfo, StoredWeights
from inflight.contracts.step.cache_layout import ALL_TOKENS, CacheLayout
from inflight.execution.attention import AttentionSpec
from inflight.execution.executors import Executor, PackedExecutor
from inflight.execution.grouped.weight import GroupedWeight
from inflight.execution.hf.load import available_cache_memory, eos_token_ids, not_honoured
from inflight.execution.hf.longrope import longrope_length
from inflight.execution.hf.model_class import prompts_decoder
from inflight.execution.kernels import kernels_in_use
from inflight.execution.multimodal import encodable
from inflight.execution.preparation.choice import ChosenExecutor
from inflight.execution.preparation.report import PreparationReport
from inflight.execution.weights.experts import PrepackedExperts
from inflight.execution.weights.grouped_linear import GroupedLinear
from inflight.execution.weights.layers import SiblingLinear
from inflight.execution.weights.prepacked_linear import PrepackedLinear


def stored_weights(model: nn.Module) -> tuple[StoredWeights, ...]:
    """All weights by storage format, each once; the largest share first."""
    seen: dict[int, tuple[str, int]] = {}
    for module in model.modules():
        for kind, key, num_bytes in _of_module(module):
            seen[key] = kind, num_bytes
    totals: dict[str, list[int]] = {}
    for kind, num_bytes in seen.values():
        totals.setdefault(kind, []).append(num_bytes)
    stored = [StoredWeights(kind, len(sizes), sum(sizes)) for kind, sizes in totals.items()]
    return tuple(sorted(stored, key=lambda each: -each.num_bytes))


def arithmetic_of(model: nn.Module) -> str | None:
    """The arithmetic of grouped weights, as in `EngineConfig.quantization_arithmetic`; None if there are none."""
    layers = [layer for module in model.modules() for layer in _layers(module)]
    if any(layer.scales is not None for layer in layers):  # int8, as are the activations
        return "fast"
    grouped = [layer for layer in layers if isinstance(layer, GroupedLinear)]
    return None if not grouped else "exact" if all(layer.is_exact for layer in grouped) else "fast"


def _layers(module: nn.Module) -> Iterator[PrepackedLinear]:
    """A module's own prepacked layers."""
    experts = getattr(module, "inflight_experts", None)
    if isinstance(experts, PrepackedExperts):
        yield from (*experts.up, *experts.down)
    if isinstance(module, SiblingLinear):
        yield module.together.linear
    elif isinstance(module, PrepackedLinear):
        yield module


def _of_module(module: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Format, identity and bytes of a module's own weights."""
    for layer in _layers(module):
        kind = layer.kind if isinstance(layer, GroupedLinear) else _name(layer.prepacked.dtype)
        num_bytes = layer.prepacked.numel() * layer.prepacked.dtype.itemsize
        yield kind, id(layer), num_bytes + (0 if layer.scales is None else layer.scales.nbytes)
    for parameter in module.parameters(recurse=False):
        weight = parameter.data
        if isinstance(weight, GroupedWeight):
            yield weight.kind, id(weight.matrices[0].panels), weight.num_bytes
        elif weight.device.type != "meta":
            yield _name(weight.dtype), id(parameter), weight.nbytes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cache_layout(executor: Executor, config: EngineConfig) -> CacheLayout:
    """The layout of an executor's cache."""
    return CacheLayout(config.kv_cache.block_size, executor.cache_groups, config.scheduling.max_num_batched_tokens)


def describe(
    model: PreTrainedModel,
    executor: Executor,
    choice: ChosenExecutor,
    config: EngineConfig,
    num_parameters: int,
    checkpoint_dtype: torch.dtype,
) -> ModelInfo:
    """Describe a prepared model.

    Args:
        num_parameters: the number before prepacking.
        checkpoint_dtype: the default dtype.

    Raises:
        ModelError: `config` wants longer sequences or rows than the model runs exactly, or too small a cache.
    """
    report, layout = choice.report, cache_layout(executor, config)
    max_model_len = _max_model_len(report, config)
    bytes_per_block = executor.bytes_per_block(config.kv_cache.block_size)
    num_blocks = max(config.scheduling.max_num_batched_tokens, layout.max_num_blocks(max_model_len))
    if executor.capabilities.chunks_prompts or not isinstance(executor, PackedExecutor):
        num_blocks = _num_blocks(executor, layout.max_num_blocks(max_model_len), config)
    num_lasting_groups = sum(group == ALL_TOKENS for group in layout.groups)
    generation_config = getattr(model, "generation_config", None) or GenerationConfig()
    return ModelInfo(
        model_class=type(model).__name__,
        num_parameters=num_parameters,
        checkpoint_dtype=str(checkpoint_dtype).removeprefix("torch."),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        executor=executor.name,
        proved_on=choice.proved_on,
        attention_backend=choice.attention_backend,
        quantization=config.quantization.method,
        arithmetic=arithmetic_of(model),
        weights=stored_weights(model),
        input_modalities=_input_modalities(model, executor, config),
        needs_item=prompts_decoder(model),
        kernels=kernels_in_use() if model.device.type == "cpu" else None,
        attention_calls=describe_calls(report.specs),
        logits_error=report.logits_error,
        attention_error=report.attention_error,
        is_batch_invariant=report.is_batch_invariant,
        vocab_size=report.vocab_size,
        max_model_len=max_model_len,
        recompute_beyond=longrope_length(model.config.get_text_config()),
        can_share_prefixes=executor.capabilities.shares_prefixes,
        can_resume=executor.capabilities.chunks_prompts and not executor.capabilities.shares_prefixes,
        state_bytes=executor.bytes_per_slot or executor.bytes_per_state,
        num_states=_num_states(executor, num_blocks, config),
        block_size=config.kv_cache.block_size,
        num_blocks=num_blocks,
        cache_groups=tuple(layout.groups),
        max_cached_len=layout.longest_sequence(num_blocks, max_model_len),
        kv_bytes_per_token=bytes_per_block * len(layout.groups) // config.kv_cache.block_size,
        kv_bytes_per_lasting_token=bytes_per_block * num_lasting_groups // config.kv_cache.block_size,
        eos_token_ids=eos_token_ids(generation_config, report.vocab_size),
        notes=(
            *getattr(model, "inflight_notes", ()),
            *report.notes,
            *_note_on_slots(executor, config),
            *not_honoured(generation_config, executor.name),
        ),
    )


def _input_modalities(model: PreTrainedModel, executor: Executor, config: EngineConfig) -> tuple[str, ...]:
    """What a prompt may have besides text."""
    features = Features(executor.name, model.device.type, config.tensor_parallel_size)
    return () if features.why_not(MULTIMODAL) is not None else encodable(model)


def _max_model_len(report: PreparationReport, config: EngineConfig) -> int:
    """The longest sequence, which `config` may limit further."""
    longest, reasons = report.max_model_len, "; ".join(report.notes)
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ModelError(
            f"max_model_len is {config.max_model_len}; this model accepts at most {longest} "
            f"({reasons or 'its max_position_embeddings'})"
        )
    if report.max_row_len is not None and config.scheduling.max_num_batched_tokens > report.max_row_len:
        raise ModelError(
            f"max_num_batched_tokens is {config.scheduling.max_num_batched_tokens}; this model accepts at most "
            f"{report.max_row_len} ({reasons})"
        )
    return longest if config.max_model_len is None else config.max_model_len


def _num_blocks(executor: Executor, max_blocks_per_sequence: int, config: EngineConfig) -> int:
    """The requested number of blocks, else as many as fit the memory, at most what all slots need at full length."""
    if config.kv_cache.num_blocks is not None:
        return config.kv_cache.num_blocks
    bytes_per_block = executor.bytes_per_block(config.kv_cache.block_size)
    memory = config.kv_cache.memory or available_cache_memory(executor.model.device)
    memory -= config.scheduling.max_num_seqs * executor.bytes_per_slot
    besides = ""
    if executor.bytes_per_state:
        besides = f" besides recurrent states of {executor.bytes_per_state} bytes"
        memory = _checkpoint_memory(executor, config)
    if memory < bytes_per_block:
        raise ModelError(
            f"the cache may take {max(0, memory)} bytes{besides}; one block of {config.kv_cache.block_size} tokens "
            f"takes {bytes_per_block}"
        )
    return min(memory // max(1, bytes_per_block), config.scheduling.max_num_seqs * max_blocks_per_sequence)


def _num_slots(executor: Executor, config: EngineConfig) -> int:
    """The most sequences that run at once: states of theirs take at most half of the memory."""
    memory = config.kv_cache.memory or available_cache_memory(executor.model.device)
    return max(1, min(config.scheduling.max_num_seqs, memory // (4 * executor.bytes_per_state)))


def _note_on_slots(executor: Executor, config: EngineConfig) -> tuple[str, ...]:
    if not executor.bytes_per_state or _num_slots(executor, config) >= config.scheduling.max_num_seqs:
        return ()
    return (
        f"at most {_num_slots(executor, config)} sequences run at once: each needs room for two recurrent states "
        f"of {executor.bytes_per_state:,} bytes",
    )


def _num_states(executor: Executor, num_blocks: int, config: EngineConfig) -> int:
    """Two states for each running sequence, and as many checkpoints as take the memory of keys and values."""
    if not executor.bytes_per_state:
        return 0
    kv_bytes = num_blocks * executor.bytes_per_block(config.kv_cache.block_size)
    num_slots, num_bytes = _num_slots(executor, config), kv_bytes or _checkpoint_memory(executor, config)
    return 2 * num_slots + max(num_slots, num_bytes // executor.bytes_per_state)


def _checkpoint_memory(executor: Executor, config: EngineConfig) -> int:
    """The most bytes of checkpoints, and of keys and values: each take half of what running sequences leave."""
    memory = config.kv_cache.memory or available_cache_memory(executor.model.device)
    return (memory - 2 * _num_slots(executor, config) * executor.bytes_per_state) // 2


def describe_calls(specs: tuple[AttentionSpec, ...]) -> tuple[str, ...]:
    """The kinds of attention calls of a forward pass in words, each with its number."""
    kinds = Counter(_describe_call(spec) for spec in specs)
    return tuple(f"{number} x {kind}" for kind, number in kinds.items())


def _describe_call(spec: AttentionSpec) -> str:
    sizes = str(spec.head_size)
    if spec.value_head_size != spec.head_size:
        sizes += f" (keys) and {spec.value_head_size} (values)"
    words = [f"{spec.num_heads} heads over {spec.num_kv_heads} key/value heads of size {sizes}"]
    if not spec.is_causal:
        words.append("bidirectional")
    if spec.window is not None:
        words.append(f"window {spec.window}")
    if spec.chunk is not None:
        words.append(f"chunks of {spec.chunk}")
    if spec.softcap is not None:
        words.append(f"softcap {spec.softcap:g}")
    if spec.has_sinks:
        words.append("sinks")
    if spec.shares_cache_with is not None:
        words.append("keys and values of an earlier call")
    return ", ".join(words)
