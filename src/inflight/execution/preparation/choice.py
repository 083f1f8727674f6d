"""Chooses a model's executor: the first of packed, rows and sequential that is proved to give the plain results.

Decides what to prove this on, and what the model itself has to show when its proxy was proved.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from transformers import PreTrainedModel

from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import ModelError
from inflight.contracts.features import Features
from inflight.execution.attention import AttentionBackend, make_backend
from inflight.execution.attention.grouping import group_calls
from inflight.execution.executors import Executor, PackedExecutor
from inflight.execution.hf.hook import attention_in_use, restore_attention
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
from inflight.execution.preparation.report import PreparationReport
from inflight.execution.preparation.result_cache import ResultCache
from inflight.execution.ranks.rank import Rank
from inflight.execution.weights.formats import find_format
from inflight.execution.weights.linears import LetGo
from inflight.execution.weights.prepacked_linear import can_prepack

logger = logging.getLogger(__name__)

LARGE = 300_000_000
"""A model of more parameters is not proved itself: that would take longer than a proof on its proxy."""
PACKED = RunMode("packed")
ITSELF, PROXY = "the model itself", "a float32 proxy"
"""What a way can be proved on, in the words of `model_info`."""
EARLIER = ", at an earlier load"
"""Follows these words."""

MakeExecutor: TypeAlias = Callable[[int, int], Executor]
"""Makes an executor for a block size and a number of slots."""


@dataclass(frozen=True, slots=True)
class ChosenExecutor:
    """The executor that was chosen for a model.

    Attributes:
        make_executor: makes the executor, with a cache that is not allocated yet.
        attention_backend: the name of what computes attention.
        result: why this one.
        proved_on: what it was proved on, in words.
    """

    make_executor: MakeExecutor
    attention_backend: str
    result: ProofResult
    proved_on: str
    report: PreparationReport


@dataclass(frozen=True, slots=True)
class Preparation:
    """What was found out about a model, as plain data for the next load of its files.

    Attributes:
        result, proved_on, report: as in `ChosenExecutor`.
        program: its graph, compiled; None: every step runs in Python.
        why_not_traced: why; None: it is traced, or was not to be.
        step: a digest of the bits that it gives for a few tokens.
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
    let_go: LetGo | None = None,
    proof_results: ResultCache[ProofResult] | None = None,
    rank: Rank | None = None,
    known: Preparation | None = None,
    is_listed: bool = False,
) -> ChosenExecutor:
    """Prove one of the executors that `config` allows, and prepare the model for it.

    Args:
        model: ours alone, in evaluation mode, on its device.
        let_go: called with each weight as soon as it is prepacked.
        proof_results: what proxies have shown before; None takes the user's.
        rank: whose part of the model is to run; None: all of it.
        known: what an earlier preparation of the same model found: nothing is proved.
        is_listed: whether its class is one of `transformers`' own, unchanged, as in the census. Such a class is proved
            on a proxy.

    Raises:
        ModelError: no executor is exact; with all reasons.
        PrepackingError: the model is not exact after prepacking, which is a mistake of ours.
    """
    if model.config.is_encoder_decoder:
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder; inflight runs decoder-only causal language models"
        )
    if proof_results is None:
        proof_results = ResultCache.of_the_user(ProofResult)
    search = _Search(model, config, let_go, proof_results, rank, is_listed=is_listed)
    return search.choose() if known is None else search.take(known)


class _Search:
    """The search for one model's executor; the arguments are `choose_executor`'s."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        let_go: LetGo | None,
        proof_results: ResultCache[ProofResult],
        rank: Rank | None,
        *,
        is_listed: bool,
    ) -> None:
        self._model = model
        self._config = config
        self._let_go = let_go
        self._proof_results = proof_results
        self._rank = rank
        self._is_large = sum(parameter.numel() for parameter in model.parameters()) > LARGE
        self._is_precise = precision_of(model) is FULL_PRECISION
        self._is_listed = is_listed
        self._is_proved_itself = self._is_precise and not self._is_large and not is_listed
        self._reasons: dict[str, str] = {}
        """For each way that was proved on a proxy but is wrong for the model itself: why."""
        self._failed: list[ProofResult] = []

    def take(self, known: Preparation) -> ChosenExecutor:
        """What was chosen for the same model before."""
        choice = self._prepare(known.result, known.proved_on.removesuffix(EARLIER) + EARLIER, known.report)
        self._tell(known.result, choice)
        return choice

    def choose(self) -> ChosenExecutor:
        """The first of the allowed ones that is exact."""
        executors = ["packed", "rows", "sequential"] if self._config.executor == "auto" else [self._config.executor]
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
        """A proof result, and what it was proved on, in words."""
        if self._is_proved_itself:
            return self._first_exact(executors, self._model, self._plain), ITSELF
        cached = None if self._config.verify else self._proof_results.find(key)
        if cached is not None:
            return cached, PROXY + EARLIER
        try:
            with _no_tensor_float(self._model.device):
                proxy = make_proxy(self._model)
        except ModelError as error:
            return self._first_exact(executors, self._model, partial(self._plain, error)), ITSELF
        with _no_tensor_float(proxy.model.device):
            result = self._first_exact(executors, proxy.model, lambda: proxy)
        if self._is_precise and result.mode.in_one_piece:  # the model itself may allow a better way
            return self._first_exact(executors, self._model, self._plain), ITSELF
        self._proof_results.keep(key, result)
        return result, PROXY

    def _plain(self, why_no_twin: ModelError | None = None) -> PlainModel:
        """The plain model itself, to prove ways on."""
        if why_no_twin is not None and not self._is_precise:
            raise why_no_twin
        with as_model_error(f"{type(self._model).__name__} does not run by itself: "):
            return PlainModel.of(self._model).with_effect()

    def _first_exact(
        self, executors: Sequence[str], subject: PreTrainedModel, plain: Callable[[], PlainModel]
    ) -> ProofResult:
        """The first of `executors` that runs `subject` exactly. Raises `ModelError` with all reasons if none does.

        Args:
            plain: computes what the subject gives when it runs alone; only called if needed.
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
        """Make the attention backend that will be used, but over a cache that rounds nothing."""
        return partial(make_backend, self._config.attention_backend, subject.device, subject.dtype)

    def _why_not_to_prepack(self, result: ProofResult, alone: PlainModel) -> str | None:
        """Why prepacking would change the model's results, tried on a proxy that is not needed any more; None: it does
        not."""
        try:
            proxy = make_proxy(self._model) if alone.model is self._model else alone
            prove_prepacking(result.mode, proxy.as_generated() if result.is_generated else proxy)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    # --------------------------------------------------------------------------------------- the model itself

    def _prepare(self, result: ProofResult, proved_on: str, known: PreparationReport | None = None) -> ChosenExecutor:
        """Prepare the model. Raises `ModelError` if it does not give its plain results."""
        model, config, mode = self._model, self._config, result.mode
        is_short = proved_on != ITSELF
        if mode != PACKED:
            report = prepare_own_attention(model, result, is_large=is_short, let_go=self._let_go, known=known)
            if known is None:
                report = replace(report, notes=(*report.notes, *_notes_on_generate(result)))
            name = str(model.config._attn_implementation)
            return ChosenExecutor(partial(make_executor, mode, model), name, result, proved_on, report)

        def backend(block_size: int) -> AttentionBackend:
            name, stored = config.attention_backend, config.kv_cache_dtype
            return make_backend(name, model.device, model.dtype, block_size, stored)

        weight_format = find_format(config.quantization, config.quantization_arithmetic)
        if known is not None:
            report = prepare_again(model, known, weight_format, self._let_go)
        else:
            report = prepare_packed(
                model,
                backend,
                weight_format=weight_format,
                rounds_cache=config.kv_cache_dtype != "auto",
                is_large=is_short,
                let_go=self._let_go,
                rank=self._rank,
                is_listed=self._is_listed and is_short,
            )
            report = replace(report, notes=(*report.notes, *_notes_on_generate(result)))

        def make(block_size: int, num_slots: int) -> Executor:
            longest = min(report.max_model_len, config.max_model_len or report.max_model_len)
            attention = backend(block_size)
            grouping = group_calls(report.specs, longest, attention.bytes_per_block)
            return PackedExecutor(model, attention, grouping, report.min_rows, report.counting)

        return ChosenExecutor(make, backend(config.block_size).name, result, proved_on, report)


def _notes_on_generate(result: ProofResult) -> tuple[str, ...]:
    if result.is_as_generate:
        return ()
    return (
        f"model.generate gives other logits (by {result.generate_difference:.1e} of their size) than one forward pass "
        "over the whole sequence, whose results these are",
    )


@contextmanager
def _no_tensor_float(device: torch.device) -> Iterator[None]:
    """Inside, a GPU computes float32 without TF32. This holds for the whole process: others compute more slowly."""
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
