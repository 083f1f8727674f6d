"""Executors that leave attention to the model (rows, sequential, recomputed): finds an exact one, and prepares the
model for it.

If a model's logits with a cache differ from one forward pass, those that `model.generate` sees are the reference. Mamba
2 is such a model: its time steps are clamped in a prompt, but not token by token. Such a model computes prompts whole,
and after a preemption, when its tokens are recomputed as a prompt, it may continue differently. RoBERTa's `generate`
counts positions from elsewhere than one forward pass; a note says so.

Deep state spaces amplify any rounding, so 20 times what rounding the embeddings once more changes is allowed. The
prompts contain the padding token, which must be a token like any other.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf

import torch
from transformers import PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.execution.executors import Executor, RowsExecutor, SequentialExecutor
from inflight.execution.executors.recomputing import RecomputingExecutor
from inflight.execution.preparation.agreement import (
    FULL_PRECISION,
    NOISE_MARGIN,
    PrepackingError,
    as_model_error,
    precision_of,
    relative_error,
)
from inflight.execution.preparation.attention_calls import num_embeddings
from inflight.execution.preparation.proof import (
    IN_SHORT,
    NUM_PROOF_SLOTS,
    PROOF,
    PROOF_BLOCK_SIZE,
    PlainModel,
    compare,
    prove,
)
from inflight.execution.preparation.proof_result import ProofResult, RunMode
from inflight.execution.preparation.report import PreparationReport, depends_on_row, own_limit
from inflight.execution.weights.experts import prepack_experts, prepack_routers
from inflight.execution.weights.linear_calls import LinearCalls, watch_linears
from inflight.execution.weights.linears import ReleaseWeight, prepack_linears
from inflight.execution.weights.prepacked_linear import can_prepack

MISTAKEN = 0.7
"""A relative error of logits that shows a mistake, unless rounding alone can be as large: then it shows nothing."""
ROUNDED = 0.2
"""The allowed relative error of logits in low precision. It finds gross mistakes only; the proof is on a proxy."""
PREPACKING_RUN_LENGTH = 12
"""Tokens of the forward pass that finds linear layers to fuse."""

RUN_MODES = {
    "rows": (RunMode("rows", pads=True), RunMode("rows"), RunMode("rows", in_one_piece=True)),
    "recomputing": (RunMode("recomputing", in_one_piece=True, uses_cache=False),),
    "sequential": (RunMode("sequential"), RunMode("sequential", in_one_piece=True)),
}
RECOMPUTED = RunMode("sequential", in_one_piece=True, uses_cache=False)


def make_executor(mode: RunMode, model: PreTrainedModel, block_size: int, num_slots: int) -> Executor:
    """Make the executor of a mode. Raises `ModelError` if it cannot handle the model's cache."""
    if mode.executor == "rows":
        return RowsExecutor(model, block_size, num_slots, in_one_piece=mode.in_one_piece, pads=mode.pads)
    if mode.executor == "recomputing":
        return RecomputingExecutor(model)
    return SequentialExecutor(model, in_one_piece=mode.in_one_piece, uses_cache=mode.uses_cache)


# ------------------------------------------------------------------------------------------- the search


def find_mode(
    plain: PlainModel, executors: Sequence[str], others: Mapping[str, str], failed: Sequence[ProofResult] = ()
) -> ProofResult:
    """The first exact mode, in the order of `executors`.

    Args:
        plain: the reference in full precision, with its effect.
        others: why executors tried before are not exact, by name.
        failed: proof results that turned out wrong for the model itself.

    Raises:
        ModelError: no mode is exact; with all reasons.
    """
    reasons = dict(others)
    not_again = {(result.mode, result.is_generated) for result in failed}
    for executor in executors:
        modes = [mode for mode in RUN_MODES[executor] if (mode, False) not in not_again]
        try:
            return _first_of(modes, plain, reasons)
        except ModelError as error:
            if modes:  # otherwise `others` says why each of them failed
                reasons[executor] = str(error)
    with suppress(ModelError):  # the reasons so far say more
        modes = [mode for executor in executors for mode in RUN_MODES[executor] if (mode, True) not in not_again]
        return _first_as_generated(plain, modes, others)
    if "sequential" in executors and (RECOMPUTED, False) not in not_again:
        with suppress(ModelError):
            return _first_of([RECOMPUTED], plain, reasons)
    raise ModelError("; ".join(reasons.values()))


def _first_as_generated(plain: PlainModel, modes: Sequence[RunMode], others: Mapping[str, str]) -> ProofResult:
    """The first mode that matches what `model.generate` sees."""
    generated = plain.as_generated()
    difference = max(map(relative_error, generated.logits, plain.logits))
    said = {
        "as in one forward pass": f"with a cache of its own the model gives others by {difference:.1e}, as here; a "
        "sequence that was preempted is recomputed as a prompt"
    }
    # In pieces, a prompt's last token may come alone, and would be computed like a token after the prompt.
    whole = [mode for mode in modes if mode.in_one_piece]
    return replace(_first_of(whole, generated, said | dict(others)), is_generated=True)


def _first_of(modes: Sequence[RunMode], plain: PlainModel, reasons: Mapping[str, str]) -> ProofResult:
    failed = []
    for mode in modes:
        try:
            _prove(mode, plain)
        except ModelError as failure:
            failed.append(f"{type(plain.model).__name__} does not run as {mode}: {failure}")
        else:
            return ProofResult(mode, dict(reasons))
    raise ModelError("; ".join(failed))


def _prove(mode: RunMode, plain: PlainModel) -> None:
    """Raise `ModelError` unless the mode is exact."""
    why_not = depends_on_row(plain.model.config.get_text_config())
    if why_not is not None and not (mode.executor == "sequential" and mode.in_one_piece):
        raise ModelError(why_not)
    with as_model_error(""):
        prove(_small(mode, plain), plain, _tolerance(plain))


def prove_prepacking(mode: RunMode, proxy: PlainModel) -> None:
    """Raise an error if prepacking changes a proxy's results, as it does where a model reads a weight directly.
    Prepacking cannot be undone, so this proxy is then unusable."""
    prepack_weights(proxy.model)
    compare(_small(mode, proxy), proxy, _tolerance(proxy))


def _tolerance(plain: PlainModel) -> float:
    return max(FULL_PRECISION.logits, NOISE_MARGIN * plain.noise)


def _small(mode: RunMode, plain: PlainModel) -> Executor:
    """An executor with a small cache, for a proof."""
    return make_executor(mode, plain.model, PROOF_BLOCK_SIZE, NUM_PROOF_SLOTS)


# ------------------------------------------------------------------------------------------- making it ready


def prepare_own_attention(
    model: PreTrainedModel,
    result: ProofResult,
    *,
    is_large: bool = False,
    release: ReleaseWeight | None = None,
    known: PreparationReport | None = None,
) -> PreparationReport:
    """Prepack a model for the proved mode, and compare it with the reference.

    Args:
        model: ours alone, in evaluation mode, on its device, with an attention implementation of its own.
        is_large: whether the comparison is short.
        release: called with each weight as soon as it is prepacked.
        known: what an earlier preparation of the same model found: nothing is compared.

    Raises:
        ModelError: the model deviates from the reference.
        PrepackingError: it deviates after prepacking.
    """
    if known is not None:
        if known.linear_calls is not None:
            prepack_weights(model, known.linear_calls, release)
        return known
    mode, linear_calls = result.mode, None
    with as_model_error(f"{type(model).__name__} does not run as {mode}: "):
        plain = PlainModel.run(model, IN_SHORT if is_large else PROOF).with_noise()
        if result.is_generated:
            plain = plain.as_generated()
        error = _compare(mode, plain)
    if can_prepack(model) and result.why_not_prepacked is None:
        try:
            linear_calls = prepack_weights(model, release=release)
            error = _compare(mode, plain)
        except Exception as failure:
            raise PrepackingError(model) from failure
    max_model_len, notes = own_limit(model.config.get_text_config())
    notes[:0] = [f"not {each}: {reason}" for each, reason in result.reasons.items()]
    if result.why_not_prepacked is not None:
        notes.append(f"its weights are not prepacked: {result.why_not_prepacked}")
    if NOISE_MARGIN * plain.noise >= MISTAKEN:
        notes.append("rounding changes its logits too much to tell anything by them: proved on a float32 proxy")
    if not mode.uses_cache:
        notes.append("nothing can be kept: a sequence is computed from its beginning for every token")
    if mode.in_one_piece:
        notes.append("prompts are computed in one piece, when their last tokens have come")
    return PreparationReport(
        max_model_len=max_model_len,
        logits_error=error,
        vocab_size=plain.vocab_size,
        linear_calls=linear_calls,
        notes=tuple(notes),
    )


def _compare(mode: RunMode, plain: PlainModel) -> float:
    """The relative error of the model itself. Raises `ModelError` if it exceeds the tolerance."""
    usual = FULL_PRECISION.logits if precision_of(plain.model) is FULL_PRECISION else ROUNDED
    tolerance = max(usual, NOISE_MARGIN * plain.noise)
    return compare(_small(mode, plain), plain, tolerance if tolerance < MISTAKEN else inf)


def prepack_weights(
    model: PreTrainedModel, calls: LinearCalls | None = None, release: ReleaseWeight | None = None
) -> LinearCalls:
    """Replace the experts and linear layers of `model` by prepacked ones.

    Args:
        calls: the linear layer calls of a forward pass; None: one is traced.
        release: called with each weight.

    Returns the calls."""
    calls = calls or _watched_calls(model)
    prepack_experts(model, release=release)
    prepack_linears(model, calls, release=release)
    prepack_routers(model)
    return calls


@torch.inference_mode()
def _watched_calls(model: PreTrainedModel) -> LinearCalls:
    tokens = torch.arange(PREPACKING_RUN_LENGTH, device=model.device)[None] % num_embeddings(model)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    with watch_linears(model) as calls:
        model(input_ids=tokens[:, :limit], use_cache=False)
    return calls
