"""`ModelRunner`: a plan in, tokens out. Everything that has to do with tensors, behind one small interface.

Decides how much cache a model gets and how long its sequences can be; knows slots and spans, never a request.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import isnan
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from inflight.contracts.cache_layout import ALL_TOKENS, CacheLayout
from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import ModelError
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.params import SamplingParams
from inflight.contracts.plan import StepPlan, StepTokens
from inflight.execution.attention import AttentionSpec, ReferenceAttention
from inflight.execution.attention.witness import WitnessedAttention
from inflight.execution.executors import PackedExecutor
from inflight.execution.hf.hook import use_attention
from inflight.execution.hf.load import ModelSource, available_cache_memory, load_model, release_checkpoint
from inflight.execution.hf.longrope import longrope_length
from inflight.execution.mapped_memory import let_go_of_file_pages
from inflight.execution.preparation.choice import Choice, choose_executor
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.sampling.logprobs import Scorer
from inflight.execution.sampling.sampler import INVALID_TOKEN, Sampler
from inflight.execution.sampling.token_mask import TokenMasks
from inflight.execution.weights.formats import find_format

NOT_HONOURED = {
    *("num_beams", "penalty_alpha", "guidance_scale", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "exponential_decay_length_penalty"),
    *("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens", "max_length", "stop_strings"),
    *("num_return_sequences", "watermarking_config", "max_time"),
}
"""Settings of a `generation_config` that change `model.generate`'s output, but not ours."""


class ModelRunner:
    """A model that was loaded and proved, its cache, and its sampler.

    Raises `ModelError` if the model cannot be loaded, or cannot be run exactly.
    """

    def __init__(self, source: ModelSource, config: EngineConfig) -> None:
        self.config = config
        self.model = load_model(source, config)
        device = self.model.device
        self._num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        why_not = find_format(config.quantization).why_unusable(self.model)
        if config.quantization is not None and why_not is not None:
            raise ModelError(f"quantization {config.quantization!r} {why_not}")
        is_loaded = device.type == "cpu" and not isinstance(source, PreTrainedModel)  # by us: no caller's memory
        choice = choose_executor(self.model, config, let_go_of_file_pages if is_loaded else None)
        if is_loaded:
            release_checkpoint(self.model)
        self.executor = choice.make_executor(config.block_size, config.max_num_seqs)
        self.info = self._describe(choice)
        self.executor.allocate(self.info.num_blocks)
        if config.compile != "off":
            reason: str | None = f"it runs as {self.executor.name}"
            if isinstance(self.executor, PackedExecutor):
                reason = self.executor.compile(choice.report.modules, config.compile)
            note = () if reason is None else (f"the model is not compiled: {reason}",)
            self.info = replace(self.info, compile="off" if reason else config.compile, notes=self.info.notes + note)
        self.sampler = Sampler(config.max_num_seqs, device)
        self.scorer = Scorer(config.max_num_seqs)
        self.device = device

    @property
    def generation_config(self) -> GenerationConfig:
        """The checkpoint's own defaults."""
        return self.model.generation_config or GenerationConfig()

    def assign(self, slot: int, params: SamplingParams, **sequence: Any) -> None:
        """A sequence has moved into a slot; the rest is `Sampler.assign`'s."""
        self.sampler.assign(slot, params, **sequence)
        self.scorer.assign(slot, params)

    def run(self, plan: StepPlan, masks: Callable[[], TokenMasks] | None = None) -> StepTokens:
        """Run one step. `masks`, if some rows may not choose freely, is called when the model has run."""
        batch = RaggedBatch.pack(plan, self.config.block_size, self.device)
        logits = self.executor.forward(batch, plan.copies)
        token_ids = self.sampler.sample(logits, batch, None if masks is None else masks())
        scores = self.scorer.score(logits, batch, token_ids)
        for row, score in scores.items():
            if isnan(score.logprob):
                token_ids[row] = INVALID_TOKEN
        return StepTokens(token_ids, scores)

    @property
    def cache_layout(self) -> CacheLayout:
        """How sequences lie in its cache."""
        return CacheLayout(self.config.block_size, self.executor.cache_groups, self.config.max_num_batched_tokens)

    def require_packed(self) -> PackedExecutor:
        """The executor. Raises `ModelError` if it leaves attention to the model, whose affairs nobody can look into."""
        if not isinstance(self.executor, PackedExecutor):
            raise ModelError(f"only models that run packed can be looked into; this one runs as {self.executor.name}")
        return self.executor

    def witness_attention(self) -> WitnessedAttention:
        """From now on run the definition beside the attention backend. The cache is new: nothing may have run yet.
        Raises `ModelError` if attention is the model's own."""
        executor = self.require_packed()
        definition = ReferenceAttention(self.model.device, self.model.dtype, self.config.block_size)
        witness = WitnessedAttention(executor.backend, definition, executor.grouping.parts[0].num_parts)
        use_attention(self.model, "inflight")  # a compiled model calls its kernels, past any backend
        self.executor = PackedExecutor(self.model, witness, executor.grouping)
        self.executor.allocate(self.info.num_blocks)
        return witness

    def _describe(self, choice: Choice) -> ModelInfo:
        config, model, report = self.config, self.model, choice.report
        max_model_len = report.max_model_len
        if config.max_model_len is not None:
            if config.max_model_len > max_model_len:
                reason = "; ".join(report.notes) or "its max_position_embeddings"
                raise ModelError(
                    f"max_model_len is {config.max_model_len}; this model accepts at most {max_model_len} ({reason})"
                )
            max_model_len = config.max_model_len
        if report.max_row_len is not None and config.max_num_batched_tokens > report.max_row_len:
            raise ModelError(
                f"max_num_batched_tokens is {config.max_num_batched_tokens}; this model accepts at most "
                f"{report.max_row_len} ({'; '.join(report.notes)})"
            )
        bytes_per_block, layout = self.executor.bytes_per_block(config.block_size), self.cache_layout
        groups = layout.groups
        num_blocks = self._choose_num_blocks(bytes_per_block, layout.max_num_blocks(max_model_len))
        num_lasting_groups = sum(group == ALL_TOKENS for group in groups)
        return ModelInfo(
            model_class=type(model).__name__,
            num_parameters=self._num_parameters,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            executor=self.executor.name,
            proved_on=choice.proved_on,
            attention_backend=choice.attention_backend,
            compile="off",
            quantization=config.quantization,
            attention_calls=_describe_calls(report.specs),
            logits_error=report.logits_error,
            attention_error=report.attention_error,
            is_batch_invariant=report.is_batch_invariant,
            vocab_size=report.vocab_size,
            max_model_len=max_model_len,
            recompute_beyond=longrope_length(model.config.get_text_config()),
            can_share_prefixes=self.executor.can_share_prefixes,
            block_size=config.block_size,
            num_blocks=num_blocks,
            cache_groups=tuple(groups),
            max_cached_len=layout.longest_sequence(num_blocks, max_model_len),
            kv_bytes_per_token=bytes_per_block * len(groups) // config.block_size,
            kv_bytes_per_lasting_token=bytes_per_block * num_lasting_groups // config.block_size,
            eos_token_ids=_eos_token_ids(self.generation_config, report.vocab_size),
            notes=(*report.notes, *_not_honoured(self.generation_config)),
        )

    def _choose_num_blocks(self, bytes_per_block: int, most_of_a_sequence: int) -> int:
        """As many as were asked for, else as fit the memory, but never more than all slots at full length need."""
        config = self.config
        if config.num_blocks is not None:
            return config.num_blocks
        memory = config.kv_cache_memory or available_cache_memory(self.model.device)
        memory -= config.max_num_seqs * self.executor.bytes_per_slot
        if memory < bytes_per_block:
            raise ModelError(
                f"the cache may take {max(0, memory)} bytes; one block of {config.block_size} tokens takes "
                f"{bytes_per_block}"
            )
        return min(memory // max(1, bytes_per_block), config.max_num_seqs * most_of_a_sequence)


def _describe_calls(specs: tuple[AttentionSpec, ...]) -> tuple[str, ...]:
    """The kinds of attention calls of a forward pass in words, each with its number."""
    kinds = Counter(_describe_call(spec) for spec in specs)
    return tuple(f"{number} x {kind}" for kind, number in kinds.items())


def _describe_call(spec: AttentionSpec) -> str:
    sizes = str(spec.head_size)
    if spec.value_head_size != spec.head_size:
        sizes += f" (keys) and {spec.value_head_size} (values)"
    words = [f"{spec.num_heads} heads over {spec.num_kv_heads} key/value heads of size {sizes}"]
    if spec.window is not None:
        words.append(f"window {spec.window}")
    if spec.chunk is not None:
        words.append(f"chunks of {spec.chunk}")
    if spec.softcap is not None:
        words.append(f"softcap {spec.softcap:g}")
    if spec.has_sinks:
        words.append("sinks")
    if spec.shares_cache_with is not None:
        words.append("keys and values of an earlier call")
    return ", ".join(words)


def _eos_token_ids(generation_config: GenerationConfig, vocab_size: int) -> tuple[int, ...]:
    """All token ids that end a sequence, as `model.generate` sees them; what is not in the vocabulary never comes."""
    ids = generation_config.eos_token_id
    ids = [] if ids is None else [ids] if isinstance(ids, int) else ids
    return tuple(token_id for token_id in ids if 0 <= token_id < vocab_size)


def _not_honoured(generation_config: GenerationConfig) -> tuple[str, ...]:
    """What the checkpoint asks `model.generate` to do and this engine does not."""
    asked = generation_config.to_diff_dict()
    return tuple(
        f"generation_config asks for {name}={asked[name]!r}, which is not done"
        for name in sorted(NOT_HONOURED & asked.keys())
    )
