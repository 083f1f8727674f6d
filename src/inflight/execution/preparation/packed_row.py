"""The packed row: the proof that a model runs so, and what makes it ready to.

A dry forward pass finds the attention calls; then two short prompts run through the plain model one by one, and packed:
in chunks, mixed, over scattered blocks. Three things must hold:

- *Each attention module* gives the plain module's output, from the plain model's own inputs (its output is replaced by
  the plain one before it goes on, so that rounding does not pile up and no router is tipped). A randomly initialised
  model's logits barely depend on its context, its attention outputs always do.
- *The logits* then are the plain model's.
- *Isolation*: other tokens in the neighbouring sequence change nothing. A state that runs along the row (a convolution,
  a state space, a linear attention) shows itself here.

What is made ready gets its weights prepacked (`linears`, `experts`) and is held against its plain results.
"""

import inspect
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from inflight.contracts.errors import ModelError
from inflight.contracts.plan import Span, StepPlan
from inflight.execution.attention import AttentionBackend
from inflight.execution.attention.grouping import Grouping
from inflight.execution.executors import PackedExecutor
from inflight.execution.hf.hook import use_attention
from inflight.execution.preparation.agreement import (
    FULL_PRECISION,
    LOW_PRECISION,
    ROUNDED_ANEW,
    NotFiniteError,
    Tolerance,
    precision_of,
    relative_error,
)
from inflight.execution.preparation.attention_calls import DRY_RUN_LENGTH, find_attention_calls, num_embeddings
from inflight.execution.preparation.limits import max_row_len, packed_limit
from inflight.execution.preparation.report import ProbeReport
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.weights.experts import prepack_experts
from inflight.execution.weights.formats import PLAIN, WeightFormat
from inflight.execution.weights.linear_calls import watch_linears
from inflight.execution.weights.linears import LetGo, prepack_linears

Step: TypeAlias = tuple[tuple[int, int, int | None], ...]
PROBE_LENGTHS = (23, 11)
"""Of the prompts of a proof."""
STEPS: tuple[Step, ...] = (
    ((0, 0, 9), (1, 0, 6)),
    ((1, 6, -1), (0, 9, 13)),
    ((1, -1, None), (0, 13, None)),
)
"""Of which prompt, from where, to where: two chunks; two chunks; a decode beside a chunk."""
SHORT_LENGTHS = (12, 8)
SHORT_STEPS: tuple[Step, ...] = (((0, 0, 5), (1, 0, -1)), ((1, -1, None), (0, 5, None)))
"""What a large model is held against its plain results with, when its twin was proved."""
INVARIANCE_LENGTH = 18
PROBE_BLOCK_SIZE = 4
NUM_PROBE_BLOCKS = 32
MakeBackend: TypeAlias = Callable[[int], AttentionBackend]
"""For a block size."""
Outputs: TypeAlias = list[torch.Tensor]
"""What attention modules returned in a forward pass, run after run: `[T, …]` each."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors: of the worst attention module, and of the logits."""

    attention: float
    logits: float


def prove_packed(model: PreTrainedModel, make_backend: MakeBackend) -> None:
    """Prove that `model`, which is ours alone, runs packed. Raises `ModelError` with the reason if it does not.

    Which attention function it calls is changed."""
    with _refusing(model):
        run = PlainRun(model, DRY_RUN_LENGTH)
        executor = run.packed(make_backend)
        run.require_agreement(executor, precision_of(model))
        packed_limit(model, run.specs)
        run.check_neighbours_and_rows(executor)


def prepare_packed(
    model: PreTrainedModel,
    make_backend: MakeBackend,
    *,
    weight_format: WeightFormat = PLAIN,
    rounds_cache: bool = False,
    is_large: bool = False,
    let_go: LetGo | None = None,
) -> ProbeReport:
    """Make a model of which this was proved fast, hold it against its plain results, and leave it ready to run packed.

    Args:
        model: ours alone, in evaluation mode, on its device.
        make_backend: gives an attention backend for a block size.
        weight_format: what its weights are prepacked as.
        rounds_cache: whether the backend keeps less of keys and values than it is given.
        is_large: whether to hold it against its plain results in short.
        let_go: called with each weight that was prepacked and is not needed any more.

    Raises:
        ModelError: it does not give its plain results.
        RuntimeError: not with prepacked weights, so that there is no way back to a model that others could run.
    """
    with _refusing(model):
        run = PlainRun(model, max(SHORT_LENGTHS if is_large else PROBE_LENGTHS), in_short=is_large)
        max_model_len, notes = packed_limit(model, run.specs)
        executor = run.packed(make_backend)
        tolerance = LOW_PRECISION if rounds_cache else precision_of(model)
        errors = run.require_agreement(executor, tolerance)
        if not is_large:
            run.check_neighbours_and_rows(executor)
        prepacks = weight_format.why_unusable(model) is None
        is_batch_invariant = not prepacks and _is_batch_invariant(executor, run.vocab_size)
    if prepacks:
        try:
            prepack_experts(model, weight_format, let_go)
            prepack_linears(model, run.linear_calls, weight_format, let_go)
            is_exact = tolerance is FULL_PRECISION and weight_format.is_lossless
            errors = run.require_agreement(executor, tolerance if is_exact else ROUNDED_ANEW)
            is_batch_invariant = _is_batch_invariant(executor, run.vocab_size)
        except Exception as error:
            raise RuntimeError(f"the weights of {type(model).__name__} could not be prepacked") from error
    return ProbeReport(
        specs=run.specs,
        modules=run.modules,
        max_model_len=max_model_len,
        attention_error=errors.attention,
        logits_error=errors.logits,
        vocab_size=run.vocab_size,
        is_batch_invariant=is_batch_invariant,
        max_row_len=max_row_len(model.config.get_text_config()),
        notes=tuple(notes),
    )


@contextmanager
def _refusing(model: PreTrainedModel) -> Iterator[None]:
    """Inside, any error says that a model cannot be packed."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot run as a packed row: {type(error).__name__}: {error}"
        ) from error


class PlainRun:
    """What a model computes when it runs as `transformers` runs it, for the packed row to be held against.

    Args:
        model: ours alone. It is left calling our attention function.
        dry_run_length: tokens of the pass in which its attention calls are looked for.
        in_short: whether to take two shorter prompts, in fewer steps.

    Raises:
        ModelError: it cannot be packed, by its signature or by its attention calls; or its logits are not finite.
    """

    def __init__(self, model: PreTrainedModel, dry_run_length: int, *, in_short: bool = False) -> None:
        name = type(model).__name__
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise ModelError(f"{name} takes no position_ids, which a packed row needs to keep sequences apart")
        max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or DRY_RUN_LENGTH
        if max_positions <= max(PROBE_LENGTHS):
            raise ModelError(
                f"{name} has only {max_positions} positions; the proof needs more than {max(PROBE_LENGTHS)}"
            )
        self.model = model
        generator = torch.Generator().manual_seed(0)
        vocab_size = num_embeddings(model)
        lengths, self._steps = (SHORT_LENGTHS, SHORT_STEPS) if in_short else (PROBE_LENGTHS, STEPS)
        self.prompts = [torch.randint(vocab_size, (each,), generator=generator).tolist() for each in lengths]
        use_attention(model, "inflight")
        with watch_linears(model) as self.linear_calls:
            self.specs, self.modules = find_attention_calls(model, min(dry_run_length, max_positions))
        use_attention(model, "eager")
        self._logits, self._outputs = self._run()
        use_attention(model, "inflight")
        if not torch.isfinite(self._logits).all():
            raise NotFiniteError(model)
        self.vocab_size = min(vocab_size, self._logits.shape[-1])

    @torch.inference_mode()
    def _run(self) -> tuple[torch.Tensor, Outputs]:
        """The prompts one by one: logits and attention outputs, prompt after prompt."""
        logits: list[torch.Tensor] = []
        outputs: list[Outputs] = []
        for prompt in self.prompts:
            tokens = torch.tensor([prompt], device=self.model.device)
            with _watch(self.modules) as seen:  # called as anybody would call it: some count positions in their own way
                logits.append(self.model(input_ids=tokens, use_cache=False, return_dict=True).logits[0])
            outputs.append(seen)
        return torch.cat(logits), [torch.cat(pieces) for pieces in zip(*outputs, strict=True)]

    def packed(self, make_backend: MakeBackend) -> PackedExecutor:
        """The model as a packed row over a small cache."""
        executor = PackedExecutor(self.model, make_backend(PROBE_BLOCK_SIZE), Grouping(self.specs))
        executor.allocate(NUM_PROBE_BLOCKS)
        return executor

    def require_agreement(self, executor: PackedExecutor, tolerance: Tolerance) -> Errors:
        """The relative errors of the packed row. Raises `ModelError` if they are more than is tolerated."""
        errors = self._compare(executor)
        if not (errors.attention <= tolerance.attention and errors.logits <= tolerance.logits):
            raise ModelError(
                f"{type(self.model).__name__} does not give the plain model's results when it runs as a packed row: "
                f"its attention differs by {errors.attention:.1e} of its size ({tolerance.attention:.0e} is allowed in "
                f"this dtype), its logits by {errors.logits:.1e} ({tolerance.logits:.0e} is allowed)"
            )
        return errors

    def _compare(self, executor: PackedExecutor) -> Errors:
        """Of the packed run's logits and of its worst attention module, each fed with plain inputs."""
        first_rows = [0, len(self.prompts[0])]
        logits_errors: list[float] = []
        attention_errors: list[float] = []
        for batch, spans in _packed_steps(self._steps, self.prompts, self.model.device):
            rows = torch.cat([torch.arange(s.start, s.end) + first_rows[s.sequence_id] for s in spans])
            plain = [output[rows.to(output.device)] for output in self._outputs]
            with _watch(self.modules, plain) as seen:
                logits = executor.forward(batch)
            attention_errors += map(relative_error, seen, plain)
            logits_errors.append(relative_error(logits, self._logits[rows.to(logits.device)]))
        return Errors(max(attention_errors), max(logits_errors))

    def check_neighbours_and_rows(self, executor: PackedExecutor) -> None:
        """Raise `ModelError` unless a sequence's logits are the same with other tokens in the one that lies before it
        in the row, and the model gives the logits of just the rows that are asked for."""
        name, device, tolerance = type(self.model).__name__, self.model.device, precision_of(self.model)
        batch, (first, second) = next(_packed_steps(self._steps, self.prompts, device))
        others, _ = next(_packed_steps(self._steps, [self.prompts[0][::-1], self.prompts[1]], device))
        logits = executor.forward(batch)
        leak = relative_error(executor.forward(others)[-second.length :], logits[-second.length :])
        if not leak <= tolerance.isolation:
            raise ModelError(
                f"{name} lets sequences of a packed row see each other by other ways than attention (a recurrent "
                f"state, a convolution): a neighbour's tokens change the logits by {leak:.1e} of their size"
            )
        last_rows = torch.tensor([first.length - 1, first.length + second.length - 1], device=device)
        few = executor.forward(replace(batch, logit_rows=last_rows))
        if relative_error(few, logits[last_rows]) > tolerance.logits:
            raise ModelError(f"{name} gives other rows of logits than those it is asked for")


def _is_batch_invariant(executor: PackedExecutor, vocab_size: int) -> bool:
    """Whether a sequence's logits are the same bits computed at once and alone, and in pieces beside another one; as
    far as a short one shows it."""
    if not executor.backend.is_batch_invariant:
        return False
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
    pieces = [run((1, 0, 2), (0, 0, length - 1))[1], run((0, length - 1, length), (1, 2, 4))[0]]
    return torch.equal(torch.cat(pieces), alone)


def _packed_steps(
    steps: Sequence[Step], prompts: Sequence[Sequence[int]], device: torch.device
) -> Iterator[tuple[RaggedBatch, Sequence[Span]]]:
    """The steps over scattered blocks. All logits are wanted."""
    tables = [array("i", range(number, NUM_PROBE_BLOCKS, len(prompts))) for number in range(len(prompts))]
    for step in steps:
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
