"""Proves that a model runs as a packed row, and prepares it for that.

A dry forward pass finds the attention calls. Then the prompts of `proof` run as the reference and packed, and three
things must hold:

- *Each attention module* gives the reference's output for the reference's inputs: its output is then replaced by the
  reference's, so that rounding does not accumulate and no router chooses otherwise. The logits of a randomly
  initialised model barely depend on the context; attention outputs always do.
- *The logits* then match the reference.
- *Isolation*: other tokens in the neighbouring sequence change nothing. Any state that runs along the row (a
  convolution, a state space, linear attention) fails this.

Measured for SmolLM2-135M in Q4_1, in exact arithmetic: attention 2.1e-6, logits 1.1e-5. Its logits are those of the row
alone: one layer makes a token's states huge (26,000) and a later one cancels them, which replaced attention outputs in
between would prevent.

To prepare a model, its weights are prepacked, and it is compared with the reference again. Prepacking cannot be undone,
so a failure from there on is a `PrepackingError`, and the model is reloaded and runs as rows.

Tests routers in isolation: does each give a row the same bits alone as among others?

A whole model's trial has few single-row steps, which a router whose last bit differs for one row in ten may pass.

Experiments on a body whose texts may run whole; no architecture is special-cased.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.execution.attention import AttentionBackend, AttentionSpec
from inflight.execution.attention.grouping import Grouping
from inflight.execution.executors import PackedExecutor
from inflight.execution.executors.counting import FROM_ZERO, Counting, skips_padding
from inflight.execution.executors.packed import MIN_PACKED_ROWS
from inflight.execution.grouped.weight import multiplied_in_place
from inflight.execution.hf.hook import use_attention
from inflight.execution.hf.own_positions import hook_positions
from inflight.execution.mixing import MixerSpec, make_mixing
from inflight.execution.pooling.states_model import gives_states
from inflight.execution.preparation.agreement import (
    FULL_PRECISION,
    LOW_PRECISION,
    PREPACKED_LOW_PRECISION,
    ROUNDED_IN_PARTS,
    PrepackingError,
    Tolerance,
    as_model_error,
    embeddings_rounded_again,
    precision_of,
    relative_error,
    worst,
)
from inflight.execution.preparation.attention_calls import (
    DRY_RUN_LENGTH,
    PlainAttention,
    find_calls,
    num_embeddings,
)
from inflight.execution.preparation.proof import (
    IN_A_ROW,
    IN_SHORT,
    NUM_PROOF_BLOCKS,
    NUM_PROOF_SLOTS,
    PROOF_BLOCK_SIZE,
    Forward,
    PlainModel,
    ProofWorkload,
    Step,
    batches_of,
    draw_prompts,
    logits_of,
    plain_logits,
)
from inflight.execution.preparation.report import PreparationReport, max_row_len, packed_limit
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.ranks.partition import divide
from inflight.execution.ranks.rank import Rank
from inflight.execution.threads import num_threads, torch_threads
from inflight.execution.weights.experts import has_own_experts, prepack_experts, prepack_routers, routers_of
from inflight.execution.weights.formats import PLAIN, WeightFormat
from inflight.execution.weights.linear_calls import LinearCalls, watch_linears
from inflight.execution.weights.linears import ReleaseWeight, prepack_linears
from inflight.execution.weights.onednn import OneDnnLinear


def counting_of(plain: PlainModel) -> Counting:
    """Find how a model counts positions. Raises `ModelError` if a packed row cannot reproduce it."""
    model, prompt, tolerance = plain.model, plain.prompts[0], precision_of(plain.model).logits
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    after_padding = [Counting(padding)] if isinstance(padding, int) else []
    for counting in (FROM_ZERO, *after_padding):
        own = np.arange(len(prompt))
        if counting.padding is not None:
            own = counting.after_padding(own, np.flatnonzero(np.array(prompt) == counting.padding))
        (states,) = plain_logits(model, prompt, positions=torch.from_numpy(own))
        if relative_error(states, plain.logits[0]) <= tolerance:
            return counting
    raise ModelError(f"{type(model).__name__} counts positions in a way that a packed row cannot reproduce")


def is_causal(plain: PlainModel) -> bool:
    """Whether the last token of a text changes no states but its own."""
    prompt = plain.prompts[0]
    (changed,) = plain_logits(plain.model, (*prompt[:-1], (prompt[-1] + 1) % num_embeddings(plain.model)))
    return relative_error(changed[:-1], plain.logits[0][:-1]) <= precision_of(plain.model).isolation


@torch.inference_mode()
def routers_keep_bits(model: PreTrainedModel, run: Callable[[], object], min_rows: int) -> bool:
    """Whether the routers of a prepacked model give each row of a forward pass the same bits alone. Routers with other
    inputs than hidden states `[…, T, hidden]` are skipped.

    Args:
        run: runs the forward pass.
        min_rows: the least rows of a router.
    """
    taken: list[tuple[nn.Module, torch.Tensor]] = []

    def take(router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            taken.append((router, args[0].clone()))

    hooks = [router.register_forward_pre_hook(take, with_kwargs=True) for router in routers_of(model)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return all(_keeps_bits(router, hidden_states, min_rows) for router, hidden_states in taken)


def _keeps_bits(router: nn.Module, hidden_states: torch.Tensor, min_rows: int) -> bool:
    """Whether a router gives each row of hidden states `[…, T, hidden]` the same bits alone, repeated `min_rows`
    times."""
    num_rows, together = hidden_states.shape[-2], _tensors(router(hidden_states))
    sizes = (*hidden_states.shape[:-2], min_rows, -1)
    for row in range(num_rows):
        alone = _tensors(router(hidden_states.narrow(-2, row, 1).expand(sizes).contiguous()))
        for few, many in zip(alone, together, strict=True):
            if num_rows in many.shape:
                dim = many.shape.index(num_rows)
                if not torch.equal(few.narrow(dim, 0, 1), many.narrow(dim, row, 1)):
                    return False
    return True


def _tensors(given: Any) -> list[torch.Tensor]:
    """The tensors `[…]` in a router's result."""
    return [each for each in (given if isinstance(given, tuple) else (given,)) if isinstance(each, torch.Tensor)]


INVARIANCE_LENGTHS = (24, 9)
ALONE: Sequence[Step] = (((0, 0, 24),),)
IN_A_BATCH: Sequence[Step] = (
    ((1, 0, 3), (0, 0, 8)),
    ((0, 8, 9), (1, 3, 4)),
    ((0, 9, 10),),
    ((1, 4, 7), (0, 10, 13)),
    ((0, 13, 14), (1, 7, 8)),
    ((1, 8, 9), (0, 14, 24)),
)
IN_A_BATCH_IN_SHORT: Sequence[Step] = (
    ((1, 0, 3), (0, 0, 8)),
    ((0, 8, 9), (1, 3, 4)),
    ((0, 9, 10),),
    ((1, 4, 9), (0, 10, 24)),
)
"""Batch invariance: the first prompt must get the same bits at once and alone as in pieces of many sizes beside a
second prompt, every other step on one thread."""
WHOLE_IN_A_BATCH: Sequence[Step] = (((1, 0, 9), (0, 0, 24)),)
MakeBackend: TypeAlias = Callable[[int], AttentionBackend]
"""Makes a backend from a block size."""


_ProofStep: TypeAlias = tuple[Sequence[tuple[int, int, int]], Sequence[torch.Tensor], torch.Tensor]
"""A step's pieces of the prompts, as (prompt, start, end); the attention modules' outputs; and its logits."""


def prove_packed(model: PreTrainedModel, make_backend: MakeBackend) -> PlainModel:
    """Prove that `model`, which is exclusively ours, runs packed, and return its reference results. Raises `ModelError`
    with the reason if it does not. The model is left calling our attention function."""
    with _refusing(model):
        proof = PackedProof(model, DRY_RUN_LENGTH)
        executor = proof.executor(make_backend)
        proof.require_agreement(executor, precision_of(model))
        packed_limit(model, proof.specs)
        proof.check_neighbours_and_rows(executor)
        return proof.plain


def prepare_packed(
    model: PreTrainedModel,
    make_backend: MakeBackend,
    *,
    weight_format: WeightFormat = PLAIN,
    is_large: bool = False,
    release: ReleaseWeight | None = None,
    rank: Rank | None = None,
    is_listed: bool = False,
) -> PreparationReport:
    """Prepack a model proved to run packed, compare it with the reference, and leave it ready to run.

    Args:
        model: ours alone, in evaluation mode, on its device.
        make_backend: with an unquantized cache.
        weight_format: of the prepacked weights.
        is_large: whether the comparison is short.
        release: called with each weight as soon as it is prepacked.
        rank: the rank whose shard is to run; None: the whole model.
        is_listed: whether a proof on a proxy covers everything but its weights: then it is compared only after
            prepacking.

    Raises:
        ModelError: the model deviates from the reference, or cannot be sharded.
        PrepackingError: it does not give them after prepacking.
    """
    with _refusing(model):
        workload = IN_SHORT if is_large else IN_A_ROW
        proof = PackedProof(model, max(workload.lengths), workload)
        if rank is not None:
            proof.divide(rank, release)
        max_model_len, notes = packed_limit(model, proof.specs)
        max_model_len -= proof.counting.first
        executor = proof.executor(make_backend)
        tolerance = precision_of(model)
        if rank is not None and tolerance is LOW_PRECISION:
            tolerance = ROUNDED_IN_PARTS
        prepacks, rounds = weight_format.why_unusable(model) is None, weight_format.rounds(model)
        if not (is_listed and prepacks):
            with multiplied_in_place() if is_large else nullcontext():
                attention_error, logits_error = proof.require_agreement(executor, tolerance)
        if not is_large:
            proof.check_neighbours_and_rows(executor)
        is_batch_invariant = not prepacks and _is_batch_invariant(executor, proof.vocab_size, is_large=is_large)
    if prepacks:
        try:
            _prepack(model, proof.linear_calls, weight_format, release)
            if tolerance is not FULL_PRECISION or rounds:
                tolerance = PREPACKED_LOW_PRECISION
            attention_error, logits_error = proof.require_agreement(executor, tolerance)
            is_batch_invariant = _make_batch_invariant(executor, proof.vocab_size, is_large=is_large)
        except Exception as error:
            raise PrepackingError(model) from error
    return PreparationReport(
        specs=proof.specs,
        mixers=proof.mixers,
        max_model_len=max_model_len,
        attention_error=attention_error,
        logits_error=logits_error,
        vocab_size=proof.vocab_size,
        is_batch_invariant=is_batch_invariant,
        min_rows=executor.min_rows,
        linear_calls=proof.linear_calls if prepacks else None,
        max_row_len=max_row_len(model.config.get_text_config()),
        counting=proof.counting,
        notes=tuple(notes),
    )


def prepare_again(
    model: PreTrainedModel, known: PreparationReport, weight_format: WeightFormat, release: ReleaseWeight | None
) -> PreparationReport:
    """`prepare_packed` with the report of an earlier preparation of the same model: nothing is compared."""
    use_attention(model, "inflight")
    if known.linear_calls is not None:
        _prepack(model, known.linear_calls, weight_format, release)
    return known


def _prepack(
    model: PreTrainedModel, calls: LinearCalls, weight_format: WeightFormat, release: ReleaseWeight | None
) -> None:
    prepack_experts(model, weight_format, release)
    prepack_linears(model, calls, weight_format, release)
    prepack_routers(model)


def _refusing(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context whose errors say that the model cannot be packed."""
    return as_model_error(f"{type(model).__name__} cannot run as a packed row: ")


class PackedProof:
    """Compares the packed row with the reference.

    Args:
        model: ours alone. It is left calling our attention function.
        dry_run_length: tokens of the forward pass that finds the attention calls.

    Raises:
        ModelError: the model's signature or its attention calls rule a packed row out, or its logits are not finite.
    """

    specs: tuple[AttentionSpec, ...]
    mixers: tuple[MixerSpec, ...]

    def __init__(self, model: PreTrainedModel, dry_run_length: int, workload: ProofWorkload = IN_A_ROW) -> None:
        name = type(model).__name__
        max_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or DRY_RUN_LENGTH
        if max_positions <= max(IN_A_ROW.lengths):
            raise ModelError(
                f"{name} has only {max_positions} positions; the proof needs more than {max(IN_A_ROW.lengths)}"
            )
        self.model = model
        self._dry_run_length = min(dry_run_length, max_positions)
        self._attention = PlainAttention(self._find_calls())
        use_attention(model, "eager")
        with self._attention.recording(len(workload.lengths)):
            self.plain = PlainModel.run(model, workload, together=workload is IN_SHORT)
        self.counting = FROM_ZERO
        if gives_states(model) or skips_padding(model):
            self.counting = counting_of(self.plain)
        if gives_states(model) and not is_causal(self.plain):
            self.specs = tuple(replace(spec, is_causal=False) for spec in self.specs)
            self.plain = replace(self.plain, workload=workload.in_whole_prompts())
        use_attention(model, "inflight")
        self.vocab_size = self.plain.vocab_size

    def _find_calls(self) -> Sequence[nn.Module]:
        use_attention(self.model, "inflight")
        with watch_linears(self.model) as self.linear_calls, multiplied_in_place():
            self.specs, self.mixers, modules = find_calls(self.model, self._dry_run_length)
        if self.specs and not hook_positions(self.model):
            raise ModelError(
                f"{type(self.model).__name__} takes no position_ids, which a packed row needs to keep sequences apart"
            )
        return modules

    def divide(self, rank: Rank, release: ReleaseWeight | None) -> None:
        """Shard the model. Its results must not change; from now on its ranks run only together. Raises `ModelError` if
        it cannot be sharded."""
        divide(self.model, rank, release)
        self._attention.modules = self._find_calls()

    def executor(self, make_backend: MakeBackend) -> PackedExecutor:
        """A packed executor with a small cache."""
        backend, grouping = make_backend(PROOF_BLOCK_SIZE), Grouping(self.specs)
        mixing = make_mixing(self.mixers, self.model.device)
        executor = PackedExecutor(self.model, backend, grouping, counting=self.counting, mixing=mixing)
        executor.allocate(NUM_PROOF_BLOCKS, NUM_PROOF_SLOTS)
        return executor

    def require_agreement(self, executor: PackedExecutor, tolerance: Tolerance) -> tuple[float, float]:
        """The largest relative errors of an attention module's output in a step, and of a span's logits. Raises
        `ModelError` if they exceed the tolerance."""
        steps: list[_ProofStep] = []
        logits_error = self.plain.error_of(self._forward(executor, steps))
        attention_error = worst(each for pieces, seen, _ in steps for each in self._attention.errors(seen, pieces))
        if not logits_error <= tolerance.logits:
            # Replacing outputs breaks states that one layer makes huge and another cancels.
            of_row_alone = self.plain.error_of(executor.forward)
            logits_error = logits_error if logits_error <= of_row_alone else of_row_alone
        is_usual = tolerance in (FULL_PRECISION, LOW_PRECISION)
        if is_usual and not tolerance.allows(attention_error, logits_error):
            tolerance = tolerance.with_noise(*self._noise(executor, steps))
        if not tolerance.allows(attention_error, logits_error):
            raise ModelError(
                f"{type(self.model).__name__} does not give the plain model's results when it runs as a packed row: "
                f"its attention differs by {attention_error:.1e} of its size ({tolerance.attention:.0e} is allowed in "
                f"this dtype), its logits by {logits_error:.1e} ({tolerance.logits:.0e} is allowed)"
            )
        return attention_error, logits_error

    def _forward(self, executor: PackedExecutor, steps: list[_ProofStep], rounds_again: bool = False) -> Forward:
        """A forward pass with reference states and outputs around attention modules, added to `steps`."""

        def forward(batch: RaggedBatch) -> torch.Tensor:
            pieces = [(span.sequence_id, span.start, span.end) for span in batch.spans]
            with self._attention.in_row(pieces, rounds_again) as seen:
                logits = executor.forward(batch)
            steps.append((pieces, seen, logits))
            return logits

        return forward

    def _noise(self, executor: PackedExecutor, steps: Sequence[_ProofStep]) -> tuple[float, float]:
        """The effect of one more rounding on attention outputs and logits of these steps."""
        rounded: list[_ProofStep] = []
        with embeddings_rounded_again(self.model):
            self.plain.error_of(self._forward(executor, rounded, rounds_again=True))
        pairs = list(zip(rounded, steps, strict=True))
        return (
            worst(relative_error(*each) for other, step in pairs for each in zip(other[1], step[1], strict=True)),
            worst(relative_error(other[2], step[2]) for other, step in pairs),
        )

    def check_neighbours_and_rows(self, executor: PackedExecutor) -> None:
        """Raise `ModelError` unless a sequence's logits stay the same when the one before it in the row has other
        tokens, and the model gives the logits of exactly the rows that it is asked for."""
        name, device, tolerance = type(self.model).__name__, self.model.device, precision_of(self.model)
        (changed, kept), steps = self.plain.prompts, self.plain.workload.steps[:1]
        batch, others = (next(batches_of([each, kept], steps, device)) for each in (changed, changed[::-1]))
        first, second = batch.spans
        logits = executor.forward(batch)
        leak = relative_error(executor.forward(others)[-second.length :], logits[-second.length :])
        if not leak <= tolerance.isolation:
            raise ModelError(
                f"{name} lets sequences of a packed row see each other by other ways than attention (a recurrent "
                f"state, a convolution): a neighbour's tokens change the logits by {leak:.1e} of their size"
            )
        last_rows = torch.tensor([first.length - 1, first.length + second.length - 1], device=device)
        few = executor.forward(replace(batch, logit_rows=last_rows))
        if not relative_error(few, logits[last_rows]) <= tolerance.logits:
            raise ModelError(f"{name} gives other rows of logits than those it is asked for")


def _make_batch_invariant(executor: PackedExecutor, vocab_size: int, *, is_large: bool) -> bool:
    """Find the fewest rows with which a prepacked model is batch-invariant. Returns whether it is."""
    if not executor.backend.is_batch_invariant:
        return False
    if has_own_experts(executor.model) or any(isinstance(each, OneDnnLinear) for each in executor.model.modules()):
        numbers = [MIN_PACKED_ROWS]  # a short trial does not show everything that these do with a single row
    else:
        numbers = [1, MIN_PACKED_ROWS]
    for number in numbers:
        executor.min_rows = number
        if _is_batch_invariant(executor, vocab_size, is_large=is_large):
            return True
    return False


def _is_batch_invariant(executor: PackedExecutor, vocab_size: int, *, is_large: bool) -> bool:
    """Whether a sequence gets the same bits of logits alone and in a batch, as far as a short one shows it."""
    if not executor.backend.is_batch_invariant:
        return False
    prompts, device = draw_prompts(vocab_size, INVARIANCE_LENGTHS), executor.model.device
    in_a_batch = IN_A_BATCH_IN_SHORT if is_large else IN_A_BATCH
    if not executor.capabilities.chunks_prompts:
        in_a_batch = WHOLE_IN_A_BATCH
    alone: list[torch.Tensor] = []

    def run_alone() -> None:
        alone.extend(logits_of(executor.forward, batches_of(prompts, ALONE, device)))

    if not routers_keep_bits(executor.model, run_alone, executor.min_rows):
        return False
    threads = cycle((1, num_threads()))

    def forward(batch: RaggedBatch) -> torch.Tensor:
        with torch_threads(next(threads)):
            return executor.forward(batch)

    return torch.equal(alone[0], logits_of(forward, batches_of(prompts, in_a_batch, device))[0])
