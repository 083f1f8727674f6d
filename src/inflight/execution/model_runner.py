"""`ModelRunner`: a plan in, tokens out. Hides all tensors behind a small interface.

Knows slots and spans, never a request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isnan

import torch
from transformers import GenerationConfig

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.features import PREFIX_STORE, Features
from inflight.contracts.api.outputs import TokenScore
from inflight.contracts.api.pooling import PoolingPlan
from inflight.contracts.step.cache_layout import CacheLayout
from inflight.contracts.step.multimodal import EncoderInput, MultimodalInputs
from inflight.contracts.step.plan import Span, SpanTokens, StepPlan, StepTokens
from inflight.execution.attention.compared import ComparedAttention
from inflight.execution.executors import GenerateExecutor, PackedExecutor, require_packed
from inflight.execution.executors.kept_states import KeptStates
from inflight.execution.hf.load import ModelSource
from inflight.execution.multimodal import BETWEEN, EncoderOutputs, GeneratedSequences
from inflight.execution.preparation.describe import cache_layout
from inflight.execution.preparation.graph_proof import prove_graph
from inflight.execution.preparation.prepare import prepare
from inflight.execution.preparation.result_cache import fingerprint
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.ranks.rank import Rank
from inflight.execution.sampling.logprobs import Scorer
from inflight.execution.sampling.sampler import INVALID_TOKEN, Sampler, TokenMasks
from inflight.execution.threads import ComputeThreads


class ModelRunner:
    """A loaded, proved model with its cache and sampler.

    Args:
        rank: the rank whose shard it runs; None: the whole model.
        pooling: how the model pools; None: it generates.

    Attributes:
        adapters: the adapters of sequences; None: `config` has none.

    Raises:
        ModelError: the model cannot be loaded, or no executor runs it exactly.
    """

    def __init__(
        self,
        source: ModelSource,
        config: EngineConfig,
        rank: Rank | None = None,
        pooling: PoolingPlan | None = None,
    ) -> None:
        self.config = config
        self.threads = ComputeThreads(config.num_threads)
        prepared = prepare(source, config, rank, pooling)
        self.model, self.executor = prepared.model, prepared.executor
        self._weights_digest = prepared.weights_digest
        self.adapters = prepared.adapters
        self.info = replace(prepared.info, num_threads=self.threads.number)
        self.device = self.model.device
        self._pooler = prepared.pooler
        self._generated: GeneratedSequences | None = None
        takes_all = isinstance(self.executor, GenerateExecutor)
        if takes_all or self.info.input_modalities:
            attention = BETWEEN if self.executor.name == "packed" else None
            self._generated = GeneratedSequences(self.model, attention, takes_all=takes_all)
        self.sampler = Sampler(config.scheduling.max_num_seqs, self.device)
        self.scorer = Scorer(config.scheduling.max_num_seqs)

    @property
    def generation_config(self) -> GenerationConfig:
        """The checkpoint's own defaults."""
        return getattr(self.model, "generation_config", None) or GenerationConfig()

    @property
    def cache_layout(self) -> CacheLayout:
        """The cache's layout."""
        return cache_layout(self.executor, self.config)

    @property
    def encoder_outputs(self) -> EncoderOutputs | None:
        """Of the model's images and sounds; None: it reads none, or its own `generate` does."""
        return self.executor.encoder_outputs if isinstance(self.executor, PackedExecutor) else None

    def check_images(self, token_ids: Sequence[int], inputs: MultimodalInputs) -> MultimodalInputs:
        """Check a prompt's images and sounds; return them with `whole`, or for the model's own `generate`."""
        if self.encoder_outputs is None:
            return inputs.generated()
        self.threads.prepare(are_own=False)
        return self.encoder_outputs.check(token_ids, inputs)

    def encode(self, wanted: Mapping[bytes, tuple[int, EncoderInput]], seconds: float | None) -> None:
        """Encode images; see `EncoderOutputs.encode`."""
        assert self.encoder_outputs is not None
        self.threads.prepare(are_own=False)
        self.encoder_outputs.encode(wanted, seconds)

    def run(self, plan: StepPlan, masks: Callable[[], TokenMasks] | None = None) -> StepTokens:
        """Run one step.

        Args:
            masks: returns the token masks of constrained rows. Called after the forward pass, so that they are computed
                meanwhile.
        """
        if self._pooler is not None:
            computed = self.compute(plan)
            return [] if computed is None else self._pooler.pool(*computed)
        if plan.released_slots:
            self.sampler.release(plan.released_slots)
            if self.scorer.is_needed:
                self.scorer.release(plan.released_slots)
        for assignment in plan.assignments:
            self.sampler.assign(assignment)
            if assignment.params.asks_for_scores:
                self.scorer.assign(assignment)
        computed = self.compute(plan)
        if computed is None:
            return []
        batch, logits = computed
        token_ids = self.sampler.sample(logits, batch, None if masks is None else masks())
        scores = self.scorer.score(logits, batch, token_ids) if self.scorer.is_needed else {}
        given = by_span(plan, token_ids, scores)
        if self._generated is not None and (errors := self._generated.errors):
            given = [
                each._replace(error=errors.get(span.sequence_id)) for span, each in zip(plan.spans, given, strict=True)
            ]
        return given

    def compute(self, plan: StepPlan) -> tuple[RaggedBatch, torch.Tensor] | None:
        """Run a step up to its logits `[R, V]`, in the model's dtype; None if it has no tokens."""
        if plan.released_slots:
            self.executor.release(plan.released_slots)
        if self.adapters is not None:
            self.adapters.take(plan)
        if self.encoder_outputs is not None:
            self.encoder_outputs.take(plan)
        if self._generated is not None:
            self._generated.take(plan)
        if self._pooler is not None:
            self._pooler.take(plan)
        if not plan.spans:
            return None
        block_size = self.config.kv_cache.block_size
        batch = RaggedBatch.from_plan(plan, block_size, self.device)
        if self.device.type == "cpu":
            are_own = isinstance(self.executor, PackedExecutor) and not self.executor.needs_torch_threads
            has_others = self._generated is not None and self._generated.has_any(batch)
            self.threads.prepare(are_own=are_own and not has_others)
        if self._pooler is not None:
            batch = self._pooler.with_types(batch)
        if self._generated is not None:
            return batch, self._generated.forward(batch, self.executor.forward, block_size)
        return batch, self.executor.forward(batch)

    def recreate_cache(self, num_blocks: int) -> None:
        """Resize the cache to `num_blocks`, before anything has run. Raises `ModelError` if the model does not run
        packed."""
        executor = self.require_packed()
        executor.run_eagerly()
        executor.allocate(num_blocks, self.info.num_states)
        self.info = replace(self.info, num_blocks=num_blocks)
        self._retrace()

    def keep_states(self, group: int, num_blocks: int) -> KeptStates:
        """Start keeping every token's last hidden state; call before anything has run. Raises `ModelError` if the model
        does not run packed.

        Args:
            group: the cache group whose block numbers they use.
            num_blocks: blocks of states; callers fill those beyond the cache's.
        """
        executor = self.require_packed()
        kept = KeptStates(self.model, group, num_blocks, self.config.kv_cache.block_size)
        executor.keep_states(kept)
        self._retrace()
        return kept

    def _retrace(self) -> None:
        """Trace the forward pass again, if it runs as a graph."""
        if self.info.is_recorded:
            reason = prove_graph(self.require_packed(), self.config, self.info.num_blocks)
            self.info = replace(self.info, is_recorded=reason is None)

    def fingerprint(self) -> bytes:
        """A digest of everything that keys and values depend on besides tokens. Raises `ModelError` if the model keeps
        no blocks on a CPU."""
        Features.from_info(self.info).require(PREFIX_STORE)
        assert self._weights_digest is not None
        return fingerprint(self.model, self.require_packed(), self.config, self.info.num_blocks, self._weights_digest)

    def rows_of_block(self, block: int) -> list[memoryview]:
        """The memory of a block of the cache. Do not write to it during a step whose plan names it."""
        return self.require_packed().rows_of_block(block)

    def require_packed(self) -> PackedExecutor:
        """The executor. Raises `ModelError` if attention is the model's own, which cannot be inspected."""
        return require_packed(self.executor)

    def compare_attention(self) -> ComparedAttention:
        """Start running reference attention beside the backend, with a new cache; call before anything has run. Raises
        `ModelError` if attention is the model's own."""
        return self.require_packed().compare_attention()


def by_span(plan: StepPlan, token_ids: list[int], scores: Mapping[int, TokenScore]) -> StepTokens:
    """Make each span's result from the tokens `[R]` of the logit rows and the scores of some rows."""
    given: StepTokens = []
    first = 0
    for span in plan.spans:
        chosen, last = first + len(span.scored_ids), first + span.num_logit_rows
        prompt_scores: tuple[TokenScore, ...] = ()
        own_scores: tuple[TokenScore, ...] = ()
        own_ids = _until_wrong(token_ids[chosen:last], span)
        if scores:
            prompt_scores = tuple(scores[row] for row in range(first, chosen) if row in scores)
            own_scores = tuple(scores[row] for row in range(chosen, chosen + len(own_ids)) if row in scores)
        num_finite = _num_finite(own_ids, own_scores, prompt_scores)
        is_finite = num_finite is None
        given.append(SpanTokens(own_ids[:num_finite], is_finite, own_scores[:num_finite], prompt_scores))
        first = last
    return given


def _until_wrong(chosen: list[int], span: Span) -> list[int]:
    """The tokens `[1 + num_draft_tokens]` chosen after a span's last known token and each of its draft tokens, up to
    the first that differs from its draft token: the rows after it belong to a rejected continuation."""
    for number, (proposed, token_id) in enumerate(zip(span.draft_token_ids, chosen, strict=False), 1):
        if proposed != token_id:
            return chosen[:number]
    return chosen


def _num_finite(
    token_ids: Sequence[int], scores: Sequence[TokenScore], prompt_scores: Sequence[TokenScore]
) -> int | None:
    """The number of a span's tokens before the first row without finite logits; None: all rows are finite."""
    if any(isnan(each.logprob) for each in prompt_scores):
        return 0
    if INVALID_TOKEN in token_ids:
        return token_ids.index(INVALID_TOKEN)
    return next((number for number, each in enumerate(scores) if isnan(each.logprob)), None)
