"""`HeadRunner`: runs a model's MTP layer as a draft model.

The layer's row for a token continues from the hidden state of the token before it, so a sequence begins there with its
second token, and places in its cache are those of hidden states. To draft further, the layer continues from its own
hidden state, which the model's replaces once the model has computed the token.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.step.plan import Span, SpanTokens, StepPlan, StepTokens
from inflight.execution.attention import make_backend
from inflight.execution.attention.grouping import Grouping
from inflight.execution.executors import PackedExecutor
from inflight.execution.executors.kept_states import KeptStates
from inflight.execution.heads.mtp_head import MtpHead, load_mtp_head
from inflight.execution.model_runner import ModelRunner, by_span
from inflight.execution.preparation.attention_calls import DRY_RUN_LENGTH, find_calls
from inflight.execution.preparation.prepare import round_as_asked
from inflight.execution.ragged_batch import RaggedBatch, cache_indices, to_device
from inflight.execution.sampling.sampler import Sampler
from inflight.execution.weights.experts import prepack_experts, prepack_routers
from inflight.execution.weights.formats import find_format
from inflight.execution.weights.linear_calls import watch_linears
from inflight.execution.weights.linears import prepack_linears


class HeadRunner:
    """The MTP layer of a model's checkpoint, with its own cache.

    Args:
        runner: the model's, which has not run yet; it starts keeping its hidden states.
        group: the cache group whose block numbers they use.
        num_blocks: of the layer's cache.

    Raises:
        ModelError: the checkpoint has no such layer, or it cannot be loaded.
    """

    def __init__(self, runner: ModelRunner, group: int, num_blocks: int) -> None:
        config = runner.config
        self._head = load_mtp_head(runner.model)
        self._executor = _prepared(self._head, config)
        self._executor.allocate(num_blocks)
        self._kept: KeptStates = runner.keep_states(group, num_blocks)
        self._threads = runner.threads
        self._block_size = config.kv_cache.block_size
        self._sampler = Sampler(config.scheduling.max_num_seqs, runner.device)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepTokens:
        """Run one step, without each sequence's first token."""
        for assignment in plan.assignments:
            self._sampler.assign(assignment)
        spans = [_shifted(span) for span in plan.spans]
        numbers = [number for number, span in enumerate(spans) if span.token_ids]
        given = [SpanTokens([]) for _ in spans]
        if not numbers:
            return given
        shifted = StepPlan(
            tuple(spans[number] for number in numbers),
            tuple(tuple(tables[number] for number in numbers) for tables in plan.tables),
        )
        for number, tokens in zip(numbers, self._run(shifted), strict=True):
            given[number] = tokens
        return given

    def _run(self, plan: StepPlan) -> StepTokens:
        if self._executor.model.device.type == "cpu":
            self._threads.prepare(are_own=False)
        batch = RaggedBatch.from_plan(plan, self._block_size, self._executor.model.device)
        self._head.states = self._kept.read(batch.groups[0].cache_indices)
        logits = self._executor.forward(batch)
        self._keep_last_states(batch)
        of_tokens = replace(batch, logit_positions_host=batch.logit_positions_host + 1)
        return by_span(plan, self._sampler.sample(logits, of_tokens, None), {})

    def _keep_last_states(self, batch: RaggedBatch) -> None:
        """Let each sequence that is drafted for go on from the layer's output."""
        spans = [number for number, span in enumerate(batch.spans) if span.num_logit_rows]
        if spans:
            tables, ends = batch.groups[0].block_tables_host[spans], batch.kv_lens_host[spans]
            places = cache_indices(tables, np.arange(len(spans)), ends, self._block_size)
            self._kept.write_at(to_device(places, batch.logit_rows.device), self._head.states[batch.logit_rows])


def _shifted(span: Span) -> Span:
    """The layer's span: positions are one lower, and the sequence's first token is left out."""
    token_ids: Sequence[int] = span.token_ids if span.start else span.token_ids[1:]
    num_logit_rows = min(span.num_logit_rows, len(token_ids))
    start, length = max(span.start - 1, 0), span.sequence_length - 1
    return replace(span, start=start, token_ids=token_ids, num_logit_rows=num_logit_rows, sequence_length=length)


def _prepared(head: MtpHead, config: EngineConfig) -> PackedExecutor:
    """Prepack a head like its model, whose embedding and head are prepacked already."""
    model: PreTrainedModel = head
    round_as_asked(model, config, model.dtype, None)
    weight_format = find_format(config.quantization.method, config.quantization.arithmetic)
    prepacks = weight_format.why_unusable(model) is None
    if prepacks:
        prepack_experts(model, weight_format)
    length = min(DRY_RUN_LENGTH, model.config.max_position_embeddings)
    head.states = torch.zeros(length, model.config.hidden_size, dtype=model.dtype, device=model.device)
    with watch_linears(model) as calls:
        specs = find_calls(model, length).specs
    if prepacks:
        prepack_linears(model, calls, weight_format)
        prepack_routers(model)
    backend = make_backend(config.debug.attention_backend, model.device, model.dtype, config.kv_cache.block_size)
    return PackedExecutor(model, backend, Grouping(specs))
