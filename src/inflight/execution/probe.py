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
        plain = _run_plain(model, modules, prompts)
        if not torch.isfinite(plain[0]).all():
            raise ModelError(f"the logits of {name} are not finite even when it runs alone: are its weights intact?")
        executor = PackedExecutor(model, make_backend(PROBE_BLOCK_SIZE), specs)
        packed = _run_packed(executor, modules, prompts)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name} can not run as a packed row: {type(error).__name__}: {error}") from error
    logits_error, *attention_errors = map(_relative_error, packed, plain)
    attention_error = max(attention_errors)
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
) -> list[torch.Tensor]:
    """The prompts one by one, as `transformers` runs them: logits, then each module's output, `[tokens, …]` each."""

    def forward(prompt: Sequence[int]) -> torch.Tensor:
        tokens = torch.tensor([prompt], device=model.device)
        positions = torch.arange(len(prompt), device=model.device)[None]
        logits: torch.Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True).logits
        return logits[0]

    with attention_implementation(model, "eager"):
        return _cat_rows([_observe(modules, forward, prompt) for prompt in prompts])


def _run_packed(
    executor: PackedExecutor, modules: Sequence[torch.nn.Module], prompts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """The same in three packed steps, over scattered blocks: two chunks; two chunks; a decode beside a chunk."""
    executor.allocate(NUM_PROBE_BLOCKS)
    tables = [array("i", range(number, NUM_PROBE_BLOCKS, len(prompts))) for number in range(len(prompts))]
    steps = [((0, 0, 9), (1, 0, 6)), ((0, 9, 13), (1, 6, -1)), ((1, -1, None), (0, 13, None))]
    results: list[list[torch.Tensor]] = []
    order: list[tuple[int, int]] = []
    for step in steps:
        parts = [(number, range(len(prompts[number]))[start:end]) for number, start, end in step]
        spans = [Span(n, n, part[0], [prompts[n][i] for i in part], len(part), len(prompts[n])) for n, part in parts]
        plan = StepPlan(tuple(spans), (tuple(tables[number] for number, _ in parts),))
        batch = RaggedBatch.pack(plan, PROBE_BLOCK_SIZE, executor.model.device)
        results.append(_observe(modules, executor.forward, batch))
        order += [(number, i) for number, part in parts for i in part]
    back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=executor.model.device)
    return [rows[back] for rows in _cat_rows(results)]


def _observe(
    modules: Sequence[torch.nn.Module], forward: Callable[[Any], torch.Tensor], given: Any
) -> list[torch.Tensor]:
    """Run `forward` on what is given: its logits `[T, V]`, then the output of each module `[T, …]`.

    The outputs of a module that runs several times in a forward pass stand side by side."""
    outputs: dict[torch.nn.Module, list[torch.Tensor]] = {module: [] for module in modules}

    def keep(module: torch.nn.Module, args: object, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        outputs[module].append(states[0].flatten(1))

    hooks = [module.register_forward_hook(keep) for module in modules]
    try:
        logits = forward(given)
    finally:
        for hook in hooks:
            hook.remove()
    return [logits, *(torch.cat(states, dim=-1) for states in outputs.values())]


def _cat_rows(results: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(pieces) for pieces in zip(*results, strict=True)]


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
    return limit, notes
