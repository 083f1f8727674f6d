"""Run prompts as packed rows, step by step, with the executor alone."""

from array import array
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inflight.contracts.step.plan import Span, StepPlan
from inflight.execution.attention import AttentionBackend, make_backend
from inflight.execution.attention.grouping import Grouping
from inflight.execution.executors import PackedExecutor
from inflight.execution.ragged_batch import RaggedBatch
from tests import zoo
from tests.execution.prepared_models import own_copy, prepare_own

BLOCK_SIZE, NUM_BLOCKS, CHUNK = 4, 256, 16


def packed_executor(model: PreTrainedModel, backend: AttentionBackend | None = None) -> PackedExecutor:
    backend = backend or make_backend("torch", model.device, model.dtype, BLOCK_SIZE)
    own = own_copy(model)
    report = prepare_own(own, lambda block_size: make_backend("torch", own.device, own.dtype, block_size))
    executor = PackedExecutor(own, backend, Grouping(report.specs))
    executor.allocate(NUM_BLOCKS)
    return executor


def packed_logits(
    executor: PackedExecutor, prompts: list[list[int]], before_step: Callable[[], object] = lambda: None
) -> list[Tensor]:
    """The logits `[len, V]` of each prompt, computed in chunks, all prompts together in scattered blocks."""
    tables = [array("i", range(number, NUM_BLOCKS, len(prompts))) for number in range(len(prompts))]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), CHUNK):
        spans = [
            Span(number, number, start, prompt[start : start + CHUNK], len(prompt[start : start + CHUNK]), len(prompt))
            for number, prompt in enumerate(prompts)
            if start < len(prompt)
        ]
        plan = StepPlan(tuple(spans), (tuple(tables[span.sequence_id] for span in spans),))
        before_step()
        step = executor.forward(RaggedBatch.from_plan(plan, BLOCK_SIZE, executor.model.device))
        for span, part in zip(spans, step.split([span.length for span in spans]), strict=True):
            logits[span.sequence_id].append(part)
    return [torch.cat(parts) for parts in logits]


def assert_packed_is_plain(model: PreTrainedModel, packed: list[Tensor], prompts: list[list[int]]) -> None:
    for ours, prompt in zip(packed, prompts, strict=True):
        theirs = zoo.plain_logits(model, prompt)
        assert (ours - theirs).abs().max() < 2e-5 * (theirs.max() - theirs.min())
