"""The probe: finds out at load how a model attends, and proves that the packed row computes what the plain model does.

Nobody's flags are believed. A dry forward pass finds the attention calls; then two short prompts run through the plain
model one by one, and packed: in chunks, mixed, over scattered blocks. Three things must hold:

- *Each attention module* gives the plain module's output, from the plain model's own inputs (its output is replaced by
  the plain one before it goes on, so that rounding does not pile up and no router is tipped). A randomly initialised
  model's logits barely depend on its context, its attention outputs always do.
- *The logits* then are the plain model's.
- *Isolation*: other tokens in the neighbouring sequence change nothing. A state that runs along the row (a convolution,
  a state space, a linear attention) shows itself here.

A model that fails is refused with the reason: a wrong token is never an option. One that passes gets its weights packed
(`linears`, `experts`) and is held against the plain results once more.
"""

import inspect
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from inflight.errors import ModelError
from inflight.execution.attention import AttentionBackend, AttentionSpec
from inflight.execution.executors import PackedExecutor
from inflight.execution.executors.hook import attend_with, attention_sinks, use_attention
from inflight.execution.experts import pack_experts
from inflight.execution.linears import LetGo, can_pack, pack_linears, watch_linears
from inflight.execution.ragged_batch import RaggedBatch
from inflight.plan import Span, StepPlan

DRY_RUN_LENGTH = 160
"""Tokens of the dry forward pass: long enough for compressed keys (DeepSeek-V4: every 128) to show themselves."""
PROBE_LENGTHS = (23, 11)
INVARIANCE_LENGTH = 64
PROBE_BLOCK_SIZE = 4
NUM_PROBE_BLOCKS = 32
Outputs: TypeAlias = list[torch.Tensor]
"""What attention modules returned in a forward pass, run after run: `[T, …]` each."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative errors that rounding explains."""

    attention: float
    logits: float
    isolation: float


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors: of the worst attention module, and of the logits."""

    attention: float
    logits: float


FULL_PRECISION = Tolerance(attention=2e-5, logits=2e-5, isolation=2e-5)
LOW_PRECISION = Tolerance(attention=3e-2, logits=1e-2, isolation=1e-3)
ROUNDED_ANEW = Tolerance(attention=5e-1, logits=5e-1, isolation=1e-3)
"""After the proof the weights are packed. In low precision that rounds what attention sees differently, and a sharp
softmax or a router makes much of it: only a mistake, which changes everything, is looked for."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the probe found.

    Attributes:
        specs: the attention calls of a forward pass, in order.
        modules: the modules that make them, each once.
        max_model_len: the longest sequence that the model runs exactly.
        attention_error: the largest difference of an attention module's output to the plain module's, relative to it.
        logits_error: the same for the logits, given the plain attention outputs.
        vocab_size: token ids that can be fed and can come out: the lesser of embedding rows and logit columns.
        is_batch_invariant: whether logits were the same bits alone, in company, and in chunks.
        max_row_len: the longest row that the model runs exactly; None: any.
        notes: what was limited, and why.
    """

    specs: tuple[AttentionSpec, ...]
    modules: tuple[torch.nn.Module, ...]
    max_model_len: int
    attention_error: float
    logits_error: float
    vocab_size: int
    is_batch_invariant: bool
    max_row_len: int | None
    notes: tuple[str, ...]


def probe_packed(
    model: PreTrainedModel,
    make_backend: Callable[[int], AttentionBackend],
    *,
    quantized: bool = False,
    let_go: LetGo | None = None,
) -> ProbeReport:
    """Make `model` fast and prove that it runs packed, and leave it ready to; or raise `ModelError` with the reason.

    Args:
        model: ours alone, in evaluation mode, on its device.
        make_backend: gives an attention backend for a block size.
        quantized: whether its weights become int8.
        let_go: called with each weight that was packed and is not needed any more.
    """
    name = type(model).__name__
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{name} takes no position_ids, which a packed row needs to keep sequences apart")
    max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or DRY_RUN_LENGTH
    if max_positions <= PROBE_LENGTHS[0]:
        raise ModelError(f"{name} has only {max_positions} positions; the proof needs more than {PROBE_LENGTHS[0]}")
    is_packed = False
    try:
        prompts = _probe_prompts(model)
        use_attention(model, "inflight")
        with watch_linears(model) as linear_calls:
            specs, modules = find_attention_calls(model, min(DRY_RUN_LENGTH, max_positions))
        use_attention(model, "eager")
        plain_logits, plain_outputs = _run_plain(model, modules, prompts)
        use_attention(model, "inflight")
        if not torch.isfinite(plain_logits).all():
            raise ModelError(f"the logits of {name} are not finite even when it runs alone: are its weights intact?")
        vocab_size = min(num_embeddings(model), plain_logits.shape[-1])
        tolerance = precision_of(model)
        executor = PackedExecutor(model, make_backend(PROBE_BLOCK_SIZE), specs)
        executor.allocate(NUM_PROBE_BLOCKS)
        errors = _compare(executor, modules, prompts, plain_logits, plain_outputs)
        _require_agreement(name, errors, tolerance)
        max_model_len, notes = _exact_length(model, specs)
        _require_isolation(name, _leak_between_neighbours(executor, prompts), tolerance)
        _check_row_selection(executor, prompts)
        if can_pack(model):
            is_packed = True
            pack_experts(model, quantized=quantized, let_go=let_go)
            pack_linears(model, linear_calls, quantized=quantized, let_go=let_go)
            errors = _compare(executor, modules, prompts, plain_logits, plain_outputs)
            exact = tolerance is FULL_PRECISION and not quantized
            _require_agreement(name, errors, tolerance if exact else ROUNDED_ANEW)
        is_batch_invariant = max_positions >= INVARIANCE_LENGTH and _is_batch_invariant(executor, vocab_size)
    except Exception as error:
        if is_packed:  # there is no way back to a model that others could run
            raise RuntimeError(f"the weights of {name} could not be packed") from error
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{name} can not run as a packed row: {type(error).__name__}: {error}") from error
    return ProbeReport(
        tuple(specs),
        tuple(modules),
        max_model_len,
        errors.attention,
        errors.logits,
        vocab_size,
        is_batch_invariant,
        _max_row_len(model.config.get_text_config()),
        tuple(notes),
    )


def _require_agreement(name: str, errors: Errors, tolerance: Tolerance) -> None:
    if not (errors.attention <= tolerance.attention and errors.logits <= tolerance.logits):
        raise ModelError(
            f"{name} does not give the plain model's results when it runs as a packed row: its attention differs by "
            f"{errors.attention:.1e} of its size ({tolerance.attention:.0e} is allowed in this dtype), its logits by "
            f"{errors.logits:.1e} ({tolerance.logits:.0e} is allowed)"
        )


def _require_isolation(name: str, leak: float, tolerance: Tolerance) -> None:
    if not leak <= tolerance.isolation:
        raise ModelError(
            f"{name} lets sequences of a packed row see each other by other ways than attention (a recurrent state, a "
            f"convolution): a neighbour's tokens change the logits by {leak:.1e} of their size"
        )


# ------------------------------------------------------------------------------------------- the dry run


@torch.inference_mode()
def find_attention_calls(
    model: PreTrainedModel, num_tokens: int
) -> tuple[tuple[AttentionSpec, ...], list[torch.nn.Module]]:
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
        if key.shape[2] != query.shape[2]:
            raise ModelError(f"{type(model).__name__} attends to {key.shape[2]} keys for {query.shape[2]} tokens")
        specs.append(_attention_spec(module, query, key, value, kwargs, config))
        if module not in modules:
            modules.append(module)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    positions = torch.arange(num_tokens, device=model.device)[None]
    with attend_with(record):
        model(input_ids=positions % num_embeddings(model), position_ids=positions, use_cache=False)
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


def num_embeddings(model: PreTrainedModel) -> int:
    """Token ids that can be fed."""
    return int(model.get_input_embeddings().weight.shape[0])


def _probe_prompts(model: PreTrainedModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(num_embeddings(model), (length,), generator=generator).tolist() for length in PROBE_LENGTHS]


@torch.inference_mode()
def _run_plain(
    model: PreTrainedModel, modules: Sequence[torch.nn.Module], prompts: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, Outputs]:
    """The prompts one by one, as `transformers` runs them: logits and attention outputs, prompt after prompt."""
    logits: list[torch.Tensor] = []
    outputs: list[Outputs] = []
    for prompt in prompts:
        tokens = torch.tensor([prompt], device=model.device)
        with _watch(modules) as seen:  # called as anybody would call it: some count positions in their own way
            logits.append(model(input_ids=tokens, use_cache=False, return_dict=True).logits[0])
        outputs.append(seen)
    return torch.cat(logits), [torch.cat(pieces) for pieces in zip(*outputs, strict=True)]


def _compare(
    executor: PackedExecutor,
    modules: Sequence[torch.nn.Module],
    prompts: Sequence[Sequence[int]],
    plain_logits: torch.Tensor,
    plain_outputs: Outputs,
) -> Errors:
    """Relative errors of the packed run's logits and of its worst attention module, each fed with plain inputs."""
    first_rows = [0, len(prompts[0])]
    logits_errors: list[float] = []
    attention_errors: list[float] = []
    for batch, spans in _packed_steps(prompts, executor.model.device):
        rows = torch.cat([torch.arange(s.start, s.end) + first_rows[s.sequence_id] for s in spans])
        plain = [output[rows.to(output.device)] for output in plain_outputs]
        with _watch(modules, plain) as seen:
            logits = executor.forward(batch)
        attention_errors += map(relative_error, seen, plain)
        logits_errors.append(relative_error(logits, plain_logits[rows.to(logits.device)]))
    return Errors(max(attention_errors), max(logits_errors))


def _leak_between_neighbours(executor: PackedExecutor, prompts: Sequence[Sequence[int]]) -> float:
    """How much a sequence's logits change, relative to their size, with the tokens of the other sequence in the row."""
    logits: list[list[torch.Tensor]] = []
    for neighbour in (prompts[0], prompts[0][::-1]):
        logits.append([])
        for batch, spans in _packed_steps([neighbour, prompts[1]], executor.model.device):
            rows = executor.forward(batch).split([span.length for span in spans])  # type: ignore[no-untyped-call]
            logits[-1].append(rows[[span.sequence_id for span in spans].index(1)])
    return relative_error(*map(torch.cat, logits))


def _is_batch_invariant(executor: PackedExecutor, vocab_size: int) -> bool:
    """Whether a sequence's logits are the same bits computed at once and alone, and in pieces beside another one."""
    device, length = executor.model.device, INVARIANCE_LENGTH
    prompts = [[(7 * i + start) % vocab_size for i in range(length)] for start in (3, 1)]
    tables = [array("i", range(number, NUM_PROBE_BLOCKS, 2)) for number in range(2)]

    def run(*parts: tuple[int, int, int]) -> list[torch.Tensor]:
        spans = tuple(
            Span(number, number, first, prompts[number][first:last], last - first, length)
            for number, first, last in parts
        )
        plan = StepPlan(spans, (tuple(tables[number] for number, _, _ in parts),))
        logits = executor.forward(RaggedBatch.pack(plan, PROBE_BLOCK_SIZE, device))
        return list(logits.split([span.length for span in spans]))  # type: ignore[no-untyped-call]

    (alone,) = run((0, 0, length))
    pieces = [run((1, 0, 5), (0, 0, 17))[1], run((0, 17, 18), (1, 5, 10))[0], run((1, 10, 40), (0, 18, length))[1]]
    return torch.equal(torch.cat(pieces), alone)


def _check_row_selection(executor: PackedExecutor, prompts: Sequence[Sequence[int]]) -> None:
    """Raise `ModelError` unless the model gives the logits of just the rows that are asked for."""
    batch, _ = next(_packed_steps(prompts, executor.model.device))
    everything = executor.forward(batch)
    last_rows = batch.cu_query_lens[1:].long() - 1
    few = executor.forward(replace(batch, logit_rows=last_rows))
    if relative_error(few, everything[last_rows]) > precision_of(executor.model).logits:
        raise ModelError(f"{type(executor.model).__name__} gives other rows of logits than those it is asked for")


def _packed_steps(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> Iterator[tuple[RaggedBatch, Sequence[Span]]]:
    """Three steps over scattered blocks: two chunks; two chunks; a decode beside a chunk. All logits are wanted."""
    tables = [array("i", range(number, NUM_PROBE_BLOCKS, len(prompts))) for number in range(len(prompts))]
    for step in (((0, 0, 9), (1, 0, 6)), ((1, 6, -1), (0, 9, 13)), ((1, -1, None), (0, 13, None))):
        parts = [(number, range(len(prompts[number]))[start:end]) for number, start, end in step]
        spans = [
            Span(number, number, part[0], [prompts[number][i] for i in part], len(part), len(prompts[number]))
            for number, part in parts
        ]
        plan = StepPlan(tuple(spans), (tuple(tables[number] for number, _ in parts),))
        yield RaggedBatch.pack(plan, PROBE_BLOCK_SIZE, device), spans


@contextmanager
def _watch(modules: Sequence[torch.nn.Module], substitutes: Outputs | None = None) -> Iterator[Outputs]:
    """Keep what `modules` return, run after run, without the batch dimension; with `substitutes`, pass those on."""
    seen: Outputs = []

    def keep(module: torch.nn.Module, args: object, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        seen.append(states[0])
        if substitutes is None:
            return None
        substitute = substitutes[len(seen) - 1][None]
        return (substitute, *output[1:]) if isinstance(output, tuple) else substitute

    hooks = [module.register_forward_hook(keep) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to how much the expected values vary within rows."""
    expected = expected.float()
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm()
    return float((actual.float() - expected).norm() / spread.clamp_min(1e-30))


def precision_of(model: PreTrainedModel) -> Tolerance:
    """What rounding explains in the dtype that a model runs in."""
    tensor_float = model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return FULL_PRECISION if model.dtype in (torch.float32, torch.float64) and not tensor_float else LOW_PRECISION


# ------------------------------------------------------------------------------------------- limits


def _exact_length(model: PreTrainedModel, specs: Sequence[AttentionSpec]) -> tuple[int, list[str]]:
    """The longest sequence that is surely exact, and why it is shorter than the model's own limit, if it is.

    Raises `ModelError` for a model that makes its windows by masks that it would have to be given."""
    config = model.config.get_text_config()
    limit = int(getattr(config, "max_position_embeddings", None) or 2**20)
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    slides = getattr(config, "use_sliding_window", True) and (not layer_types or "sliding_attention" in layer_types)
    notes = []
    if window is not None and slides and window < limit and all(spec.window is None for spec in specs):
        raise ModelError(f"{type(model).__name__} does not tell attention its sliding window of {window}")
    max_row_len = _max_row_len(config)
    if max_row_len is not None and max_row_len < limit:
        limit = max_row_len
        notes.append(f"sequences are limited to {limit} tokens: beyond, the model scales attention by place in the row")
    return limit, notes


def _max_row_len(config: PreTrainedConfig) -> int | None:
    """Llama 4 tunes attention's temperature, from `floor_scale` on, by a token's place in the row, not its position."""
    tunes = getattr(config, "attn_temperature_tuning", False) and config.model_type == "llama4_text"
    return int(config.floor_scale) - 1 if tunes else None
