"""`ModelRunner`: a plan in, tokens out. Everything that has to do with tensors, behind one small interface.

Decides how much cache a model gets and how long its sequences can be; knows slots and spans, never a request.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isnan

from transformers import GenerationConfig, PreTrainedModel

from inflight.contracts.cache_layout import ALL_TOKENS, CacheLayout
from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import ModelError
from inflight.contracts.model_info import ModelInfo
from inflight.contracts.outputs import TokenScore
from inflight.contracts.plan import SpanTokens, StepPlan, StepTokens
from inflight.execution.attention import AttentionSpec
from inflight.execution.attention.witness import WitnessedAttention
from inflight.execution.executors import PackedExecutor, require_packed
from inflight.execution.hf.generation_defaults import eos_token_ids, not_honoured
from inflight.execution.hf.load import ModelSource, available_cache_memory, load_model, release_checkpoint
from inflight.execution.hf.longrope import longrope_length
from inflight.execution.mapped_memory import let_go_of_file_pages
from inflight.execution.preparation.choice import Choice, choose_executor
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.sampling.logprobs import Scorer
from inflight.execution.sampling.sampler import INVALID_TOKEN, Sampler
from inflight.execution.sampling.token_mask import TokenMasks
from inflight.execution.weights.formats import find_format


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
            reason = self.executor.compile(config.compile)
            note = () if reason is None else (f"the model is not compiled: {reason}",)
            self.info = replace(self.info, compile="off" if reason else config.compile, notes=self.info.notes + note)
        self.sampler = Sampler(config.max_num_seqs, device)
        self.scorer = Scorer(config.max_num_seqs)
        self.device = device

    @property
    def generation_config(self) -> GenerationConfig:
        """The checkpoint's own defaults."""
        return self.model.generation_config or GenerationConfig()

    def run(self, plan: StepPlan, masks: Callable[[], TokenMasks] | None = None) -> StepTokens:
        """Run one step. `masks`, if some rows may not choose freely, is called when the model has run."""
        if plan.released_slots:
            for keeper in (self.executor, self.sampler, self.scorer):
                keeper.release(plan.released_slots)
        for assignment in plan.assignments:
            self.sampler.assign(assignment)
            self.scorer.assign(assignment)
        if not plan.spans:
            return []
        batch = RaggedBatch.from_plan(plan, self.config.block_size, self.device)
        logits = self.executor.forward(batch)
        token_ids = self.sampler.sample(logits, batch, None if masks is None else masks())
        scores = self.scorer.score(logits, batch, token_ids)
        return _by_span(plan, token_ids, scores)

    @property
    def cache_layout(self) -> CacheLayout:
        """How sequences lie in its cache."""
        return CacheLayout(self.config.block_size, self.executor.cache_groups, self.config.max_num_batched_tokens)

    def require_packed(self) -> PackedExecutor:
        """The executor. Raises `ModelError` if attention is the model's own, which cannot be looked into."""
        return require_packed(self.executor)

    def witness_attention(self) -> WitnessedAttention:
        """From now on run the definition of attention beside the backend. The cache is new: nothing may have run yet.
        Raises `ModelError` if attention is the model's own."""
        return self.require_packed().witness()

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
            can_share_prefixes=self.executor.capabilities.shares_prefixes,
            block_size=config.block_size,
            num_blocks=num_blocks,
            cache_groups=tuple(groups),
            max_cached_len=layout.longest_sequence(num_blocks, max_model_len),
            kv_bytes_per_token=bytes_per_block * len(groups) // config.block_size,
            kv_bytes_per_lasting_token=bytes_per_block * num_lasting_groups // config.block_size,
            eos_token_ids=eos_token_ids(self.generation_config, report.vocab_size),
            notes=(*report.notes, *not_honoured(self.generation_config)),
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


def _by_span(plan: StepPlan, token_ids: list[int], scores: Mapping[int, TokenScore]) -> StepTokens:
    """What a step gave each span, from the tokens `[R]` of its logit rows and the scores of some of them."""
    given: StepTokens = []
    first = 0
    for span in plan.spans:
        last = first + span.num_logit_rows
        chosen = first + len(span.scored_ids)
        is_finite = INVALID_TOKEN not in token_ids[first:last]
        if scores:
            of_rows = [scores[row] for row in range(first, last) if row in scores]
            is_finite = is_finite and not any(isnan(score.logprob) for score in of_rows)
            num_of_prompt = sum(row in scores for row in range(first, chosen))
            of_prompt, of_chosen = of_rows[:num_of_prompt], of_rows[num_of_prompt:]
            given.append(SpanTokens(token_ids[chosen:last] if is_finite else [], is_finite, of_chosen, of_prompt))
        else:
            given.append(SpanTokens(token_ids[chosen:last] if is_finite else [], is_finite))
        first = last
    return given


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
