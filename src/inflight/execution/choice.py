"""Which executor runs a model: the first of packed, rows and sequential that is proved to do as the plain model does.

Decides in which order they are tried, and what is said about those that are not exact. Nobody's flags are believed, and
no model is known by its name: a wrong token is never an option.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from inflight.config import EngineConfig
from inflight.errors import ModelError
from inflight.execution.attention import AttentionBackend
from inflight.execution.executors import Executor, PackedExecutor, RowsExecutor, SequentialExecutor
from inflight.execution.executors.hook import attention_in_use, restore_attention
from inflight.execution.executors.longrope import longrope_length
from inflight.execution.experts import pack_experts
from inflight.execution.linears import LetGo, can_pack, pack_linears, watch_linears
from inflight.execution.probe import (
    DRY_RUN_LENGTH,
    FULL_PRECISION,
    ProbeReport,
    num_embeddings,
    precision_of,
    probe_packed,
    relative_error,
)
from inflight.execution.proof import NUM_PROOF_SLOTS, PROOF_BLOCK_SIZE, PlainModel, compare, logits_of, prove
from inflight.execution.twin import make_twin

logger = logging.getLogger(__name__)

MakeExecutor: TypeAlias = Callable[[int, int], Executor]
"""Over a cache of a block size and a number of slots."""
UNNAMED_LIMIT = 32_768
"""Tokens that a sequence may have where the model names no limit."""

ROUNDED = 0.2
"""The relative error of logits that rounding explains in low precision, where only a mistake is looked for: the proof
is on a twin."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen.

    Attributes:
        make_executor: makes it anew, over a cache of a block size and a number of slots.
        attention_backend: the name of what computes attention.
    """

    make_executor: MakeExecutor
    attention_backend: str
    report: ProbeReport


def choose_executor(
    model: PreTrainedModel,
    config: EngineConfig,
    make_backend: Callable[[int], AttentionBackend],
    let_go: LetGo | None = None,
) -> Choice:
    """Prove one of the executors that `config` allows. Raises `ModelError` with all reasons if none is exact.

    Args:
        model: ours alone, in evaluation mode, on its device. It is left ready for what was chosen.
        make_backend: gives an attention backend for a block size.
        let_go: called with each weight that was packed and is not needed any more.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder; inflight runs decoder-only causal language models")
    wanted = ("packed", "rows", "sequential") if config.executor == "auto" else (config.executor,)
    in_use, reasons = attention_in_use(model), dict[str, str]()
    plain: PlainModel | None = None
    for executor in wanted:
        try:
            if executor == "packed":
                return _packed(model, config, make_backend, let_go)
            restore_attention(model, in_use)
            plain = plain or _plain(model)
            return _by_logits(model, executor, config, plain, reasons, let_go)
        except ModelError as error:
            reasons[executor] = str(error)
    if plain is not None:
        with suppress(Exception):  # what has failed says more
            return _as_generated(model, wanted, config, plain, reasons, let_go)
        if "sequential" in wanted:
            with suppress(ModelError):
                return _by_logits(model, "recomputed", config, plain, reasons, let_go)
    raise ModelError("; ".join(reasons.values()))


def _as_generated(
    model: PreTrainedModel,
    wanted: Sequence[str],
    config: EngineConfig,
    plain: PlainModel,
    reasons: Mapping[str, str],
    let_go: LetGo | None,
) -> Choice:
    """The first executor that gives what `model.generate` sees, where that is not what one forward pass gives. Raises
    if there is none."""
    generated = plain.as_generated(model)
    difference = max(map(relative_error, generated.logits, plain.logits))
    said = {
        "as in one forward pass": f"with a cache of its own the model gives others by {difference:.1e}, as here; a "
        "sequence that was preempted is computed anew as a prompt"
    }
    if "packed" in reasons:
        said["packed"] = reasons["packed"]
    for name in wanted:
        if name in WAYS:
            with suppress(ModelError):
                return _by_logits(model, name, config, generated, said, let_go)
    raise ModelError("none is")


def _plain(model: PreTrainedModel) -> PlainModel:
    try:
        return PlainModel.of(model)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{type(model).__name__} does not run by itself: {type(error).__name__}: {error}") from error


def _packed(
    model: PreTrainedModel,
    config: EngineConfig,
    make_backend: Callable[[int], AttentionBackend],
    let_go: LetGo | None,
) -> Choice:
    report = probe_packed(model, make_backend, quantized=config.quantization is not None, let_go=let_go)

    def make(block_size: int, num_slots: int) -> Executor:
        return PackedExecutor(model, make_backend(block_size), report.specs)

    return Choice(make, make_backend(config.block_size).name, report)


@dataclass(frozen=True, slots=True)
class _Way:
    """A way of running a model that leaves attention to it.

    Attributes:
        pads: whether beginnings of different lengths run together.
        in_one_piece: whether prompts are only run whole.
        uses_cache: whether anything is kept.
    """

    name: str
    pads: bool = False
    in_one_piece: bool = False
    uses_cache: bool = True

    def __str__(self) -> str:
        pieces = f"with prompts in {'one piece' if self.in_one_piece else 'pieces'}"
        return f"{self.name} {pieces}{', padded' if self.pads else ''}{'' if self.uses_cache else ', without a cache'}"

    def make(self, model: PreTrainedModel, block_size: int, num_slots: int) -> Executor:
        """The executor."""
        if self.name == "rows":
            return RowsExecutor(model, block_size, num_slots, in_one_piece=self.in_one_piece, pads=self.pads)
        return SequentialExecutor(model, in_one_piece=self.in_one_piece, uses_cache=self.uses_cache)

    def make_small(self, model: PreTrainedModel) -> Executor:
        """One for a proof."""
        return self.make(model, PROOF_BLOCK_SIZE, NUM_PROOF_SLOTS)


WAYS = {
    "rows": (_Way("rows", pads=True), _Way("rows"), _Way("rows", in_one_piece=True)),
    "sequential": (_Way("sequential"), _Way("sequential", in_one_piece=True)),
    "recomputed": (_Way("sequential", in_one_piece=True, uses_cache=False),),
}


def _by_logits(
    model: PreTrainedModel,
    name: str,
    config: EngineConfig,
    plain: PlainModel,
    reasons: Mapping[str, str],
    let_go: LetGo | None,
) -> Choice:
    """Prove one of those that leave attention to the model: the first of its ways that is exact."""
    if config.quantization is not None or config.kv_cache_dtype != "auto":
        raise ModelError("int8 weights and caches need a model that runs packed")
    is_precise = precision_of(model) is FULL_PRECISION
    subject, of_subject = (model, plain) if is_precise else make_twin(model)
    if plain.is_generated and not is_precise:
        of_subject = of_subject.as_generated(subject)
    failed: list[str] = []
    depends_on_row = _depends_on_row(model.config.get_text_config())
    for way in WAYS[name]:
        if depends_on_row is not None and not (way.name == "sequential" and way.in_one_piece):
            failed.append(f"{type(model).__name__} does not run as {way}: {depends_on_row}")
            continue
        if plain.is_generated and not way.in_one_piece:
            continue  # the last token of a prompt, by itself, would be computed as one that follows it
        try:
            error = prove(way.make_small(subject), of_subject, FULL_PRECISION.logits)
            if not is_precise:
                error = compare(way.make_small(model), plain, ROUNDED)
        except Exception as failure:
            why = str(failure) if isinstance(failure, ModelError) else f"{type(failure).__name__}: {failure}"
            failed.append(f"{type(model).__name__} does not run as {way}: {why}")
            continue
        max_model_len, notes = _limit(model.config.get_text_config())
        if can_pack(model):
            error, unpacked = _pack(model, plain, way, let_go)
            notes += unpacked
        if not way.uses_cache:
            notes.append("nothing can be kept: a sequence is computed from its beginning for every token")
        if way.in_one_piece:
            notes.append("prompts are computed in one piece, when their last tokens have come")
        notes[:0] = [f"not {each}: {reason}" for each, reason in reasons.items()]
        logger.warning("%s runs as %s: %s", type(model).__name__, way.name, "; ".join(notes))
        backend = str(model.config._attn_implementation)
        return Choice(partial(way.make, model), backend, _report(plain, error, max_model_len, notes))
    raise ModelError("; ".join(failed))


def _pack(model: PreTrainedModel, plain: PlainModel, way: _Way, let_go: LetGo | None) -> tuple[float, list[str]]:
    """Lay the weights out for how they are read, if a twin stands it; the error then, and what is to be said.

    There is no way back for the model itself, which may read a weight in ways of its own."""
    try:
        twin, of_twin = make_twin(model)
        of_twin = replace(of_twin, logits=logits_of(way.make_small(twin), of_twin))
        pack_weights(twin)
        compare(way.make_small(twin), of_twin, FULL_PRECISION.logits)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return compare(way.make_small(model), plain, ROUNDED), [f"its weights are not packed: {reason}"]
    pack_weights(model, let_go)
    is_precise = precision_of(model) is FULL_PRECISION
    try:
        return compare(way.make_small(model), plain, FULL_PRECISION.logits if is_precise else ROUNDED), []
    except Exception as error:
        raise RuntimeError(f"the weights of {type(model).__name__} could not be packed") from error


@torch.inference_mode()
def pack_weights(model: PreTrainedModel, let_go: LetGo | None = None) -> None:
    """Replace experts and linear layers by packed ones."""
    tokens = torch.arange(DRY_RUN_LENGTH, device=model.device)[None] % num_embeddings(model)
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    with watch_linears(model) as calls:
        model(input_ids=tokens[:, :limit], use_cache=False)
    pack_experts(model, quantized=False, let_go=let_go)
    pack_linears(model, calls, let_go=let_go)


def _depends_on_row(config: PreTrainedConfig) -> str | None:
    """What of a model depends on where a token stands in its row, or on the longest sequence there, so far out that no
    proof sees it; None: nothing that is known."""
    if longrope_length(config) is not None:
        return "its position embeddings depend on the longest sequence of a batch (LongRoPE)"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "its chunks of attention are counted from the beginning of the row"
    return None


def _limit(config: PreTrainedConfig) -> tuple[int, list[str]]:
    """The longest sequence, and what is to be said about it."""
    limit = getattr(config, "max_position_embeddings", None)
    if isinstance(limit, int) and limit > 0:
        return limit, []
    return UNNAMED_LIMIT, [f"the model names no limit to its context; {UNNAMED_LIMIT} tokens are taken for one"]


def _report(plain: PlainModel, error: float, max_model_len: int, notes: list[str]) -> ProbeReport:
    return ProbeReport(
        specs=(),
        modules=(),
        max_model_len=max_model_len,
        attention_error=0.0,
        logits_error=error,
        vocab_size=plain.vocab_size,
        is_batch_invariant=False,
        max_row_len=None,
        notes=tuple(notes),
    )
