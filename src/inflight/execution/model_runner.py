"""`ModelRunner`: a plan in, tokens out. Everything that has to do with tensors, behind one small interface.

Knows slots and spans, never a request.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isnan

from transformers import GenerationConfig

from inflight.contracts.cache_layout import CacheLayout
from inflight.contracts.config import EngineConfig
from inflight.contracts.outputs import TokenScore
from inflight.contracts.plan import SpanTokens, StepPlan, StepTokens
from inflight.execution.attention.witness import WitnessedAttention
from inflight.execution.executors import PackedExecutor, require_packed
from inflight.execution.hf.load import ModelSource
from inflight.execution.preparation.describe import cache_layout
from inflight.execution.preparation.prepare import prepare
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.sampling.logprobs import Scorer
from inflight.execution.sampling.sampler import INVALID_TOKEN, Sampler
from inflight.execution.sampling.token_mask import TokenMasks
from inflight.execution.threads import ComputeThreads


class ModelRunner:
    """A model that was loaded and proved, its cache, and its sampler.

    Raises:
        ModelError: the model cannot be loaded, or no executor runs it exactly.
    """

    def __init__(self, source: ModelSource, config: EngineConfig) -> None:
        self.config = config
        self.threads = ComputeThreads(config.num_threads)
        prepared = prepare(source, config)
        self.model, self.executor = prepared.model, prepared.executor
        self.info = replace(prepared.info, num_threads=self.threads.number)
        self.device = self.model.device
        self.sampler = Sampler(config.max_num_seqs, self.device)
        self.scorer = Scorer(config.max_num_seqs)

    @property
    def generation_config(self) -> GenerationConfig:
        """The checkpoint's own defaults."""
        return self.model.generation_config or GenerationConfig()

    @property
    def cache_layout(self) -> CacheLayout:
        """How sequences lie in the cache."""
        return cache_layout(self.executor, self.config)

    def run(self, plan: StepPlan, masks: Callable[[], TokenMasks] | None = None) -> StepTokens:
        """Run one step.

        Args:
            masks: gives the masks of rows that may not choose freely. Called after the forward pass, so that they can
                be computed meanwhile.
        """
        if plan.released_slots:
            self.executor.release(plan.released_slots)
            self.sampler.release(plan.released_slots)
            if self.scorer.is_needed:
                self.scorer.release(plan.released_slots)
        for assignment in plan.assignments:
            self.sampler.assign(assignment)
            if assignment.params.asks_for_scores:
                self.scorer.assign(assignment)
        if not plan.spans:
            return []
        if self.device.type == "cpu":
            are_own = isinstance(self.executor, PackedExecutor) and not self.executor.needs_torch_threads
            self.threads.prepare(are_own=are_own)
        batch = RaggedBatch.from_plan(plan, self.config.block_size, self.device)
        logits = self.executor.forward(batch)
        token_ids = self.sampler.sample(logits, batch, None if masks is None else masks())
        scores = self.scorer.score(logits, batch, token_ids) if self.scorer.is_needed else {}
        return _by_span(plan, token_ids, scores)

    def require_packed(self) -> PackedExecutor:
        """The executor. Raises `ModelError` if attention is the model's own, which cannot be looked into."""
        return require_packed(self.executor)

    def witness_attention(self) -> WitnessedAttention:
        """From now on run the definition of attention beside the backend. The cache is made anew, so nothing may have
        run yet. Raises `ModelError` if attention is the model's own."""
        return self.require_packed().witness()


def _by_span(plan: StepPlan, token_ids: list[int], scores: Mapping[int, TokenScore]) -> StepTokens:
    """What a step gave each span, from the tokens `[R]` of its logit rows and the scores of some of these rows."""
    given: StepTokens = []
    first = 0
    for span in plan.spans:
        chosen, last = first + len(span.scored_ids), first + span.num_logit_rows
        is_finite = INVALID_TOKEN not in token_ids[first:last]
        prompt_scores: tuple[TokenScore, ...] = ()
        own_scores: tuple[TokenScore, ...] = ()
        if scores:
            prompt_scores = tuple(scores[row] for row in range(first, chosen) if row in scores)
            own_scores = tuple(scores[row] for row in range(chosen, last) if row in scores)
            is_finite = is_finite and not any(isnan(each.logprob) for each in prompt_scores + own_scores)
        given.append(SpanTokens(token_ids[chosen:last] if is_finite else [], is_finite, own_scores, prompt_scores))
        first = last
    return given
