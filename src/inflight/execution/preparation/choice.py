"""Chooses a model's executor: the first of packed, rows and sequential that is proved to match the reference; for some
models without one, their own `generate`.

Decides whether to prove it on the model or a proxy, and what to check on the model after a proof on its proxy.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from transformers import AutoModelForMultimodalLM, PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.contracts.api.features import Features
from inflight.execution.attention import AttentionBackend, make_backend
from inflight.execution.attention.grouping import group_calls
from inflight.execution.executors import Executor, GenerateExecutor, PackedExecutor
from inflight.execution.hf.hook import attention_in_use, restore_attention
from inflight.execution.hf.model_class import auto_class_of
from inflight.execution.mixing import make_mixing
from inflight.execution.pooling.states_model import gives_states
from inflight.execution.preparation.agreement import (
    FULL_PRECISION,
    NotFiniteError,
    PrepackingError,
    as_model_error,
    precision_of,
)
from inflight.execution.preparation.kept_program import KeptProgram
from inflight.execution.preparation.own_attention import (
    find_mode,
    make_executor,
    prepare_own_attention,
    prove_prepacking,
)
from inflight.execution.preparation.packed_proof import MakeBackend, prepare_again, prepare_packed, prove_packed
from inflight.execution.preparation.proof import PlainModel
from inflight.execution.preparation.proof_result import ProofResult, RunMode, proof_key
from inflight.execution.preparation.proxy import make_proxy
from inflight.execution.preparation.report import PreparationReport, own_limit
from inflight.execution.preparation.result_cache import ResultCache
from inflight.execution.ranks.rank import Rank
from inflight.execution.weights.formats import find_format
from inflight.execution.weights.linears import ReleaseWeight
from inflight.execution.weights.prepacked_linear import can_prepack

logger = logging.getLogger(__name__)

LARGE = 300_000_000
"""A model of more parameters is proved on its proxy, which is faster."""
PACKED, GENERATE = RunMode("packed"), RunMode("generate", in_one_piece=True)
ITSELF, PROXY = "the model itself", "a float32 proxy"
"""Subjects of a proof, in the words of `model_info`."""
EARLIER = ", at an earlier load"
"""Follows these words."""

MakeExecutor: TypeAlias = Callable[[int, int], Executor]
"""Makes an executor from a block size and a number of slots."""


@dataclass(frozen=True, slots=True)
class ChosenExecutor:
    """The chosen executor of a model.

    Attributes:
        make_executor: makes the executor, with an unallocated cache.
        attention_backend: the name of the attention backend.
        result: the proof.
        proved_on: the subject of the proof, in words.
    """

    make_executor: MakeExecutor
    attention_backend: str
    result: ProofResult
    proved_on: str
    report: PreparationReport


@dataclass(frozen=True, slots=True)
class Preparation:
    """The results of a preparation, as plain data for the next load of the same files.

    Attributes:
        result, proved_on, report: as in `ChosenExecutor`.
        program: the compiled graph; None: steps run in Python.
        why_not_traced: why there is none; None: it was traced, or not requested.
        step: a digest of the bits of its logits for a few tokens.
    """

    result: ProofResult
    proved_on: str
    report: PreparationReport
    program: KeptProgram | None
    why_not_traced: str | None
    step: bytes


def choose_executor(
    model: PreTrainedModel,
    config: EngineConfig,
    release: ReleaseWeight | None = None,
    proof_results: ResultCache[ProofResult] | None = None,
    rank: Rank | None = None,
    known: Preparation | None = None,
    is_listed: bool = False,
) -> ChosenExecutor:
    """Prove one of the executors that `config` allows, and prepare the model for it.

    Args:
        model: exclusively ours, in evaluation mode, on its device.
        release: called with each weight once prepacked.
        proof_results: cached proof results of proxies; None: the user's cache.
        rank: the rank whose shard is to run; None: the whole model.
        known: the result of an earlier preparation of the same model: nothing is proved.
        is_listed: whether its class is an unchanged one of `transformers`, as in the census. Such a class is proved on
            a proxy.

    Raises:
        ModelError: no executor is exact; with all reasons.
        PrepackingError: the model is not exact after prepacking, which is a bug.
    """
    name, asked = type(model).__name__, config.debug.executor
    may_generate = asked in ("auto", "generate") and rank is None and not gives_states(model) and model.can_generate()
    reason = None if asked != "generate" else "it is asked for"
    if model.config.is_encoder_decoder:
        reason = f"{name} is an encoder-decoder"
    elif "reference_sliding_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        reason = f"{name} has attention with a window over the answer and none over the prompt"
    if reason is not None and not may_generate:
        raise ModelError(f"{reason}; such a model runs in its own generate alone, whole and in one process")
    if reason is None:
        if proof_results is None:
            proof_results = ResultCache.of_the_user(ProofResult)
        search = _Search(model, config, release, proof_results, rank, is_listed=is_listed)
        try:
            return search.choose() if known is None else search.take(known)
        except NotFiniteError:
            raise
        except ModelError as error:
            if known is not None or not may_generate or auto_class_of(model.config) is not AutoModelForMultimodalLM:
                raise
            reason = str(error)
    return _left_to_generate(model, config, reason)


def _left_to_generate(model: PreTrainedModel, config: EngineConfig, reason: str) -> ChosenExecutor:
    """The model's own `generate`, of which nothing is to be proved."""
    try:
        Features(executor=GENERATE.executor).require_all(config.asked_features())
    except ModelError as error:
        raise ModelError(f"{reason}; {error}") from error
    given, got = model.get_input_embeddings(), model.get_output_embeddings()
    vocab_size = min(each.weight.shape[0] for each in (given, got) if each is not None)
    max_model_len, notes = own_limit(model.config.get_text_config(decoder=True))
    notes.append(f"every prompt runs whole and alone, in the model's own generate: {reason}")
    logger.warning("%s runs as generate: %s", type(model).__name__, reason)
    report = PreparationReport(max_model_len=max_model_len, logits_error=0.0, vocab_size=vocab_size, notes=tuple(notes))
    make = partial(GenerateExecutor, model, vocab_size)
    name = str(model.config._attn_implementation)
    return ChosenExecutor(lambda *_: make(), name, ProofResult(GENERATE), "nothing", report)


class _Search:
    """The search for one model's executor; the arguments are `choose_executor`'s."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        release: ReleaseWeight | None,
        proof_results: ResultCache[ProofResult],
        rank: Rank | None,
        *,
        is_listed: bool,
    ) -> None:
        self._model = model
        self._config = config
        self._release = release
        self._proof_results = proof_results
        self._rank = rank
        self._is_large = sum(parameter.numel() for parameter in model.parameters()) > LARGE
        self._is_precise = precision_of(model) is FULL_PRECISION
        self._is_listed = is_listed
        self._is_proved_itself = self._is_precise and not self._is_large and not is_listed
        self._reasons: dict[str, str] = {}
        """Why each way that was proved on a proxy fails on the model itself."""
        self._failed: list[ProofResult] = []

    def take(self, known: Preparation) -> ChosenExecutor:
        """The earlier choice for the same model."""
        choice = self._prepare(known.result, known.proved_on.removesuffix(EARLIER) + EARLIER, known.report)
        self._tell(known.result, choice)
        return choice

    def choose(self) -> ChosenExecutor:
        """The first allowed executor that is exact."""
        executors = (
            ["packed", "rows", "sequential"] if self._config.debug.executor == "auto" else [self._config.debug.executor]
        )
        if self._rank is not None or gives_states(self._model):
            executors = ["packed"]
        in_use = attention_in_use(self._model)
        key = None
        if self._proof_results.keeps and not self._is_proved_itself:
            key = proof_key(self._model, self._config)
        while True:
            result, proved_on = self._prove(executors, key)
            try:
                choice = self._prepare(result, proved_on)
            except NotFiniteError:
                raise
            except ModelError as error:
                restore_attention(self._model, in_use)
                self._proof_results.forget(key)
                self._failed.append(result)
                self._reasons["packed" if result.mode == PACKED else str(result.mode)] = str(error)
                if result.mode == PACKED:
                    executors = executors[1:]
                key = None
                if not executors:
                    raise ModelError("; ".join(self._reasons.values())) from error
            except PrepackingError:
                self._proof_results.forget(key)
                raise
            else:
                self._tell(result, choice)
                return choice

    def _tell(self, result: ProofResult, choice: ChosenExecutor) -> None:
        """Log the choice in one line."""
        name, executor = type(self._model).__name__, result.mode.executor
        said = "; ".join((f"{name} runs as {executor}, proved on {choice.proved_on}", *choice.report.notes))
        logger.log(logging.INFO if executor == "packed" else logging.WARNING, "%s", said)

    # --------------------------------------------------------------------------------------- the proof

    def _prove(self, executors: Sequence[str], key: str | None) -> tuple[ProofResult, str]:
        """A proof result and its subject, in words."""
        if self._is_proved_itself:
            return self._first_exact(executors, self._model, self._plain), ITSELF
        cached = None if self._config.debug.verify else self._proof_results.find(key)
        if cached is not None:
            return cached, PROXY + EARLIER
        try:
            with _no_tensor_float(self._model.device):
                proxy = make_proxy(self._model)
        except ModelError as error:
            return self._first_exact(executors, self._model, partial(self._plain, error)), ITSELF
        with _no_tensor_float(proxy.model.device):
            result = self._first_exact(executors, proxy.model, lambda: proxy)
        if self._is_precise and result.mode.in_one_piece:  # the model itself may allow a better executor
            return self._first_exact(executors, self._model, self._plain), ITSELF
        self._proof_results.keep(key, result)
        return result, PROXY

    def _plain(self, why_no_twin: ModelError | None = None) -> PlainModel:
        """The model itself as the reference."""
        if why_no_twin is not None and not self._is_precise:
            raise why_no_twin
        with as_model_error(f"{type(self._model).__name__} does not run by itself: "):
            return PlainModel.run(self._model).with_effect()

    def _first_exact(
        self, executors: Sequence[str], subject: PreTrainedModel, plain: Callable[[], PlainModel]
    ) -> ProofResult:
        """The first of `executors` that runs `subject` exactly. Raises `ModelError` with all reasons if none does.

        Args:
            plain: computes the reference results of the subject; only called if needed.
        """
        reasons = dict(self._reasons)
        if executors[0] == "packed":
            in_use = attention_in_use(subject)
            try:
                proved = prove_packed(subject, self._exact_backend(subject))
                restore_attention(subject, in_use)
                return ProofResult(PACKED, generate_difference=proved.with_noise().generate_difference())
            except NotFiniteError:
                raise
            except ModelError as error:
                reasons["packed"] = str(error)
                restore_attention(subject, in_use)
        own = [executor for executor in executors if executor != "packed"]
        if not own:
            raise ModelError("; ".join(reasons.values()))
        try:
            Features(executor=own[0]).require_all(self._config.asked_features())
            alone = plain()
        except ModelError as error:
            raise ModelError("; ".join([*reasons.values(), str(error)])) from error
        result = replace(find_mode(alone, own, reasons, self._failed), generate_difference=alone.generate_difference())
        if not can_prepack(self._model):
            return result
        return replace(result, why_not_prepacked=self._why_not_to_prepack(result, alone))

    def _exact_backend(self, subject: PreTrainedModel) -> MakeBackend:
        """Make the attention backend that will be used, with an unquantized cache."""
        return partial(make_backend, self._config.debug.attention_backend, subject.device, subject.dtype)

    def _why_not_to_prepack(self, result: ProofResult, alone: PlainModel) -> str | None:
        """Why prepacking changes the model's results, tried on a proxy no longer needed; None: it does not."""
        try:
            proxy = make_proxy(self._model) if alone.model is self._model else alone
            prove_prepacking(result.mode, proxy.as_generated() if result.is_generated else proxy)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    # --------------------------------------------------------------------------------------- the model itself

    def _prepare(self, result: ProofResult, proved_on: str, known: PreparationReport | None = None) -> ChosenExecutor:
        """Prepare the model. Raises `ModelError` if it deviates from the reference."""
        model, config, mode = self._model, self._config, result.mode
        is_short = proved_on != ITSELF
        if mode != PACKED:
            report = prepare_own_attention(model, result, is_large=is_short, release=self._release, known=known)
            if known is None:
                report = replace(report, notes=(*report.notes, *_notes_on_generate(result)))
            name = str(model.config._attn_implementation)
            return ChosenExecutor(partial(make_executor, mode, model), name, result, proved_on, report)

        def backend(block_size: int) -> AttentionBackend:
            name, stored = config.debug.attention_backend, config.kv_cache.dtype
            return make_backend(name, model.device, model.dtype, block_size, stored)

        weight_format = find_format(config.quantization.method, config.quantization.arithmetic)
        if known is not None:
            report = prepare_again(model, known, weight_format, self._release)
        else:
            report = prepare_packed(
                model,
                self._exact_backend(model),
                weight_format=weight_format,
                is_large=is_short,
                release=self._release,
                rank=self._rank,
                is_listed=self._is_listed and is_short,
            )
            report = replace(report, notes=(*report.notes, *_notes_on_generate(result)))

        def make(block_size: int, num_slots: int) -> Executor:
            longest = min(report.max_model_len, config.max_model_len or report.max_model_len)
            attention = backend(block_size)
            grouping = group_calls(report.specs, longest, attention.bytes_per_block)
            mixing = make_mixing(report.mixers, model.device)
            return PackedExecutor(model, attention, grouping, report.min_rows, report.counting, mixing)

        return ChosenExecutor(make, backend(config.kv_cache.block_size).name, result, proved_on, report)


def _notes_on_generate(result: ProofResult) -> tuple[str, ...]:
    if result.is_as_generate:
        return ()
    return (
        f"model.generate gives other logits (by {result.generate_difference:.1e} of their size) than one forward pass "
        "over the whole sequence, whose results these are",
    )


@contextmanager
def _no_tensor_float(device: torch.device) -> Iterator[None]:
    """A context without TF32 on GPUs. It affects the whole process: other threads compute more slowly."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
