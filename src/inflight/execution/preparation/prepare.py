"""`prepare`: loads a model, proves it exact, prepacks it and allocates its cache."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.contracts.api.features import QUANTIZATION, Features
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.api.pooling import PoolingPlan
from inflight.execution.adapters import Adapters, make_embedding_adaptable
from inflight.execution.executors import Executor, GenerateExecutor, PackedExecutor
from inflight.execution.executors.counting import FROM_ZERO
from inflight.execution.hf.load import (
    ModelSource,
    convert,
    dtype_of_checkpoint,
    load_model,
    own_tensors,
    resolve_dtype,
)
from inflight.execution.hf.source import first_line, read_config
from inflight.execution.mapped_memory import give_back_freed_memory, release_file_pages
from inflight.execution.multimodal import EncoderOutputs, ItemProof
from inflight.execution.pooling.heads import TextPooler
from inflight.execution.pooling.states_model import PoolingParts, load_parts
from inflight.execution.preparation.agreement import PrepackingError
from inflight.execution.preparation.choice import Preparation, choose_executor
from inflight.execution.preparation.describe import describe
from inflight.execution.preparation.graph_proof import digest_of_step, prove_graph
from inflight.execution.preparation.kept_program import linked, unlinked
from inflight.execution.preparation.proof_result import preparation_key
from inflight.execution.preparation.result_cache import ResultCache, digest_of_weights
from inflight.execution.ranks.rank import Rank
from inflight.execution.threads import torch_alone
from inflight.execution.weights.formats import find_format
from inflight.execution.weights.grouped_linear import can_group
from inflight.execution.weights.linears import ReleaseWeight
from inflight.execution.weights.rounded_model import round_weights, rounding_of

logger = logging.getLogger(__name__)

MAX_COPIED = 2**26
"""Parameters of a caller's model up to this many bytes are copied; larger ones are shared and watched."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A ready model.

    Attributes:
        weights_digest: of the weights as loaded; None: not needed.
        adapters: its adapters; None: prepared without.
        pooler: computes a text's numbers from its states; None: it generates.
    """

    model: PreTrainedModel
    executor: Executor
    info: ModelInfo
    weights_digest: bytes | None = None
    adapters: Adapters | None = None
    pooler: TextPooler | None = None


def prepare(
    source: ModelSource, config: EngineConfig, rank: Rank | None = None, pooling: PoolingPlan | None = None
) -> PreparedModel:
    """Load a model, choose its executor, and allocate its cache. A model that cannot be prepacked is reloaded to run as
    rows, if the executor is "auto".

    Args:
        rank: the rank whose shard is to run; None: the whole model.
        pooling: how the model pools; None: it generates.

    Raises:
        ModelError: it cannot be loaded, no allowed executor runs it exactly, or there is too little memory.
        PrepackingError: it cannot be prepacked, and no other executor may run it.
    """
    reason = None
    try:
        with torch_alone():
            return _prepare(source, config, rank, pooling)
    except StalePreparationError as error:
        logger.warning("%s; the model is loaded and proved again", error)
    except PrepackingError as error:
        if config.debug.executor != "auto" or rank is not None or pooling is not None:
            raise
        reason = f"not packed: {error}: {error.__cause__}"
    if reason is None:
        return prepare(source, config.replace(verify=True), rank, pooling)
    logger.warning("%s; the model is loaded again", reason)  # the first one is gone with the error's traceback
    try:
        with torch_alone():
            prepared = _prepare(source, config.replace(executor="rows"), None, None)
    except ModelError as error:
        raise ModelError(f"{reason}; {error}") from error
    return replace(prepared, info=replace(prepared.info, notes=(reason, *prepared.info.notes)))


class StalePreparationError(Exception):
    """A cached preparation is wrong."""


@contextmanager
def _as_stale(known: Preparation | None) -> Iterator[None]:
    """A context that turns errors into `StalePreparationError`s if there is a cached preparation."""
    try:
        yield
    except Exception as error:
        if known is None:
            raise
        raise StalePreparationError(f"the cached preparation does not hold ({first_line(error)})") from error


def _prepare(
    source: ModelSource, config: EngineConfig, rank: Rank | None, pooling: PoolingPlan | None
) -> PreparedModel:
    model_config = source.config if isinstance(source, PreTrainedModel) else read_config(source, config)
    checkpoint_dtype = source.dtype if isinstance(source, PreTrainedModel) else dtype_of_checkpoint(model_config)
    options: dict[str, Any] = {"model_config": model_config, "in_own_dtype": rounding_of(config) is not None}
    parts = None if pooling is None else load_parts(source, config, pooling, **options)
    model = load_model(source, config, **options) if parts is None else parts.body
    is_callers = isinstance(source, PreTrainedModel)
    is_listed = not is_callers and type(model).__module__.startswith("transformers.models.")
    cache, key = ResultCache.of_the_user(Preparation), None
    if is_listed and rank is None and cache.keeps and model.device.type == "cpu":
        key = preparation_key(model, config, source)
    known = None if config.debug.verify else cache.find(key)
    digest = None if config.prefix_cache.folder is None else digest_of_weights(model)
    is_loaded_here = model.device.type == "cpu" and not is_callers  # not a caller's memory
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    dtype = model.dtype if is_callers else resolve_dtype(config.dtype, model.config, model.device)
    release = release_file_pages if is_loaded_here else None
    round_as_asked(model, config, dtype, release)
    why_not = find_format(config.quantization.method).why_unusable(model)
    if config.quantization.method is not None and why_not is not None:
        raise ModelError(f"quantization {config.quantization.method!r} {why_not}")
    if config.adapters is not None:
        make_embedding_adaptable(model)
    with _as_stale(known):
        choice = choose_executor(model, config, release, rank=rank, known=known, is_listed=is_listed)
    if is_loaded_here:
        own_tensors(model)
        give_back_freed_memory()
    elif model.device.type == "cpu":
        own_tensors(model, MAX_COPIED)
    executor = choice.make_executor(config.kv_cache.block_size, config.scheduling.max_num_seqs)
    key = None if isinstance(executor, GenerateExecutor) else key  # nothing was proved
    info = describe(model, executor, choice, config, num_parameters, checkpoint_dtype)
    executor.allocate(info.num_blocks, info.num_states)
    if isinstance(executor, PackedExecutor) and info.input_modalities:
        calls, proofs = partial(getattr, executor, "attention_calls"), ResultCache.of_the_user(ItemProof)
        executor.encoder_outputs = EncoderOutputs(model, calls, proofs, None if config.debug.verify else key)
    pooler = None
    if parts is not None:
        info = _of_texts(info, executor, parts)
        assert info.pooling is not None
        pooler = TextPooler(parts.head, info.pooling)
    adapters = None
    if config.adapters is not None:
        adapters = Adapters(executor, config.kv_cache.block_size, config.adapter_memory)
    reason = None if known is None else known.why_not_traced
    if isinstance(executor, PackedExecutor) and config.debug.record_forward and model.device.type == "cpu":
        if known is None:
            longest = config.scheduling.max_num_batched_tokens if pooler is None else info.max_model_len
            longest_row = max(config.scheduling.max_num_batched_tokens, longest)
            reason = prove_graph(executor, config.replace(max_num_batched_tokens=longest_row), info.num_blocks)
        elif known.program is not None:
            with _as_stale(known):
                executor.run_program(linked(known.program, executor))
        note = () if reason is None else (f"every step runs in Python: {reason}",)
        info = replace(info, is_recorded=reason is None, notes=info.notes + note)
    if key is not None:
        with _as_stale(known):
            step = digest_of_step(executor, config.kv_cache.block_size, info.num_blocks)
            if known is not None and step != known.step:
                raise ModelError("a few tokens get other bits")
        if known is None:
            program = unlinked(executor) if isinstance(executor, PackedExecutor) else None
            if (program is not None) == info.is_recorded:
                found = Preparation(choice.result, choice.proved_on, choice.report, program, reason, step)
                cache.keep(key, found)
    return PreparedModel(model, executor, info, digest, adapters, pooler)


def _of_texts(info: ModelInfo, executor: Executor, parts: PoolingParts) -> ModelInfo:
    """A body's `ModelInfo`, for the whole model."""
    counts_from_zero = isinstance(executor, PackedExecutor) and executor.counting == FROM_ZERO
    shares = parts.plan.reads_last_token and executor.capabilities.shares_prefixes and counts_from_zero
    longest = min(info.max_model_len, parts.plan.max_tokens or info.max_model_len)
    plan = replace(parts.plan, reads_last_token=shares, max_tokens=longest)
    cached = min(longest, info.max_cached_len)
    return replace(
        info,
        model_class=parts.name,
        max_model_len=longest,
        max_cached_len=cached,
        can_share_prefixes=shares,
        eos_token_ids=(),
        pooling=plan,
    )


def round_as_asked(
    model: PreTrainedModel, config: EngineConfig, dtype: torch.dtype, release: ReleaseWeight | None
) -> None:
    """Quantize the weights of a model, which is exclusively ours, if configured, and convert the others to this dtype.
    Raises `ModelError` on failure."""
    rounding = rounding_of(config)
    if rounding is None:
        return
    if not can_group():
        raise ModelError(f"quantization {rounding.kind!r} needs a C++ compiler")
    Features(device=model.device.type).require(QUANTIZATION)
    round_weights(model, rounding, dtype, release)
    convert(model, dtype)
