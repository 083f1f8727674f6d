"""The probe: finds out at load how a model attends, and proves that the packed row computes what the plain model does.

Nobody's flags are believed. A first dry forward finds the attention calls; then two short prompts run through the plain
model one by one, and through the packed row in chunks, mixed, over scattered blocks. The logits must agree, and so must
the output of every attention module: a randomly initialised model's logits barely depend on its context, its
attention outputs always do. A model that disagrees is refused: a wrong token is never an option.
"""

import inspect
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from inflight.errors import ModelError
from inflight.execution.attention import AttentionBackend, AttentionSpec
from inflight.execution.executors import PackedExecutor
from inflight.execution.executors.hook import attend_with, attention_implementation
from inflight.execution.executors.packed import attention_sinks
from inflight.execution.ragged_batch import RaggedBatch
from inflight.plan import Span, StepPlan

PROBE_BLOCK_SIZE = 4
PROBE_LENGTHS = (23, 11)
NUM_PROBE_BLOCKS = 16
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest relative error that rounding explains; other dtypes have `LOW_PRECISION_TOLERANCE`."""
LOW_PRECISION_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the probe found.

    Attributes:
        specs: the attention calls of a forward pass, in order.
        max_model_len: the longest sequence that the model runs exactly.
        logits_error: norm of the difference to the plain model's logits, relative to their spread.
        attention_error: the largest such error of an attention module's output.
        notes: what was limited, and why.
    """

    specs: tuple[AttentionSpec, ...]
    max_model_len: int
    logits_error: float
    attention_error: float
    notes: tuple[str, ...]


def probe_packed(model: PreTrainedModel, make_backend: Callable[[int], AttentionBackend]) -> ProbeReport:
    """Prove that `model` runs packed, or raise `ModelError` with the reason.

    Args:
        model: in evaluation mode, on its device.
        make_backend: gives an attention backend for a block size.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder; inflight runs decoder-only causal language models")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{name} takes no position_ids, which a packed row needs to keep sequences apart")
    try:
        specs, modules = find_attention_calls(model)
        prompts = _probe_prompts(model)
        plain_logits, plain_attention = _run_plain(model, modules, prompts)
        if not torch.isfinite(plain_logits).all():
            raise ModelError(f"the logits of {name} are not finite even when it runs alone: are its weights intact?")
        executor = PackedExecutor(model, make_backend(PROBE_BLOCK_SIZE), specs)
        packed_logits, packed_attention = _run_packed(executor, modules, prompts)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name} can not run as a packed row: {type(error).__name__}: {error}") from error
    logits_error = _relative_error(packed_logits, plain_logits)
    attention_error = max(map(_relative_error, packed_attention, plain_attention))
    tolerance = TOLERANCE.get(model.dtype, LOW_PRECISION_TOLERANCE)
    if not (logits_error <= tolerance and attention_error <= tolerance):
        raise ModelError(
            f"{name} does not give the plain model's results when it runs as a packed row: its logits differ by "
            f"{logits_error:.1e} and its attention by {attention_error:.1e} of their size, where {tolerance:.0e} is "
            f"allowed in {str(model.dtype).removeprefix('torch.')}"
        )
    max_model_len, notes = _exact_length(model.config.get_text_config(), specs)
    return ProbeReport(specs, max_model_len, logits_error, attention_error, tuple(notes))


@torch.inference_mode()
def find_attention_calls(model: PreTrainedModel) -> tuple[tuple[AttentionSpec, ...], list[torch.nn.Module]]:
    """One dry forward pass: the spec of each attention call in order, and the modules that make them (each once)."""
    specs: list[AttentionSpec] = []
    modules: list[torch.nn.Module] = []
    config = model.config.get_text_config()

    def record(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        if mask is not None or kwargs.get("position_bias") is not None:
            raise ModelError(f"{type(model).__name__} gives attention a mask or a position bias of its own making")
        specs.append(_attention_spec(module, query, key, value, kwargs, config))
        if module not in modules:
            modules.append(module)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    tokens = torch.tensor([[1, 2, 3]], device=model.device)
    with attend_with(model, record):
        model(input_ids=tokens, position_ids=torch.arange(3, device=model.device)[None], use_cache=False)
    if not specs:
        raise ModelError(
            f"{type(model).__name__} does its attention itself instead of calling the attention function that it is "
            "given, so its sequences can not be kept apart in a packed row"
        )
    return tuple(specs), modules


def _attention_spec(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kwargs: dict[str, Any],
    config: PreTrainedConfig,
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


# ------------------------------------------------------------------------------------------- the two ways


def _probe_prompts(model: PreTrainedModel) -> list[list[int]]:
    vocab_size = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in PROBE_LENGTHS]


@torch.inference_mode()
def _run_plain(
    model: PreTrainedModel, modules: Sequence[torch.nn.Module], prompts: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits `[tokens of all prompts, V]` and each module's output `[tokens, …]`, prompt after prompt, unpacked."""
    logits: list[torch.Tensor] = []
    with attention_implementation(model, "eager"), _OutputsOf(modules) as outputs:
        for prompt in prompts:
            tokens = torch.tensor([prompt], device=model.device)
            positions = torch.arange(len(prompt), device=model.device)[None]
            logits.append(model(input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True).logits[0])
    return torch.cat(logits), [torch.cat(outputs.of(module)) for module in modules]


def _run_packed(
    executor: PackedExecutor, modules: Sequence[torch.nn.Module], prompts: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same by way of three steps: a chunk beside a whole prompt, two chunks, a decode beside a chunk."""
    executor.allocate(NUM_PROBE_BLOCKS)
    long, short = range(len(prompts[0])), range(len(prompts[1]))
    steps = [{0: long[:9], 1: short[:6]}, {0: long[9:13], 1: short[6:-1]}, {1: short[-1:], 0: long[13:]}]
    scattered = [array("i", range(block, NUM_PROBE_BLOCKS, 2)) for block in (0, 1)]
    rows: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    parts: dict[int, list[list[torch.Tensor]]] = {0: [], 1: []}
    for step in steps:
        spans = tuple(Span(i, i, part[0], [prompts[i][p] for p in part], len(part)) for i, part in step.items())
        tables = tuple(scattered[span.sequence_id] for span in spans)
        batch = RaggedBatch.pack(StepPlan(spans, (tables,)), PROBE_BLOCK_SIZE, executor.model.device)
        with _OutputsOf(modules) as outputs:
            logits = executor.forward(batch)
        lengths = [span.length for span in spans]
        per_module = [torch.cat(outputs.of(module)).split(lengths) for module in modules]
        for number, (span, span_logits) in enumerate(zip(spans, logits.split(lengths), strict=True)):
            rows[span.sequence_id].append(span_logits)
            parts[span.sequence_id].append([pieces[number] for pieces in per_module])
    steps_in_order = [*parts[0], *parts[1]]
    return torch.cat([*rows[0], *rows[1]]), [torch.cat(pieces) for pieces in zip(*steps_in_order, strict=True)]


class _OutputsOf:
    """Context manager that keeps what modules return: their first tensor, without the batch dimension.

    A module that runs several times in one forward pass counts with its last run."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._outputs: dict[torch.nn.Module, list[torch.Tensor]] = {module: [] for module in modules}
        self._hooks: list[Any] = []

    def of(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """What the module returned, call after call."""
        return self._outputs[module]

    def __enter__(self) -> "_OutputsOf":
        for module in self._outputs:
            self._hooks.append(module.register_forward_hook(self._keep))
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, module: torch.nn.Module, args: object, output: Any) -> None:
        self._outputs[module].append((output[0] if isinstance(output, tuple) else output)[0])


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.float()
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm()
    return float((actual.float() - expected).norm() / spread.clamp_min(1e-30))


# ------------------------------------------------------------------------------------------- limits


def _exact_length(config: PreTrainedConfig, specs: Sequence[AttentionSpec]) -> tuple[int, list[str]]:
    """The longest sequence that is surely exact, and why it is shorter than the model's own limit, if it is."""
    limit = int(getattr(config, "max_position_embeddings", None) or 2**20)
    notes = []
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    if window is not None and window < limit and all(spec.window is None for spec in specs):
        limit = window
        notes.append(f"sequences are limited to {window} tokens: the model does not tell attention its sliding window")
    for parameters in _rope_parameter_sets(config):
        # LongRoPE chooses its factors by the longest sequence in the row. (So does dynamic NTK scaling, but only
        # beyond max_position_embeddings.)
        regime = parameters["original_max_position_embeddings"] if parameters.get("rope_type") == "longrope" else limit
        if regime < limit:
            limit = regime
            notes.append(
                f"sequences are limited to {regime} tokens: LongRoPE would let a longer one change its neighbours"
            )
    return limit, notes


def _rope_parameter_sets(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The position embeddings' parameters: one set, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]
