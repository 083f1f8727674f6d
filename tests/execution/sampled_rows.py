"""Rows of logits, and the tokens that the sampler chooses for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.plan import SlotAssignment, Span, StepPlan
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.sampling.sampler import Sampler

CPU = torch.device("cpu")
NUM_SLOTS = 64
LARGEST_UNIFORM = 1 - 2**-24
GREEDY = SamplingParams(temperature=0)
INFINITY = float("inf")

FILTERED = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=-1),
    SamplingParams(top_k=1, temperature=2.0),
    SamplingParams(top_k=20),
    SamplingParams(top_p=0.9),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=1.5, top_k=50, top_p=0.8),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1),
    SamplingParams(temperature=3.0, top_p=0.5, min_p=0.3),
    SamplingParams(temperature=0.3, top_k=10**6, top_p=0.999, min_p=1e-5),
    SamplingParams(temperature=1.2, top_k=3, min_p=0.9),
]


@dataclass(frozen=True)
class Row:
    """One row of logits: its sequence, and the length of that sequence."""

    params: SamplingParams = field(default_factory=SamplingParams)
    output_position: int = 0
    seed: int = 0
    index: int = 0
    prompt_len: int = 5
    stop_token_ids: Sequence[int] = ()


def sample(logits: Tensor, rows: Sequence[Row], slots: Sequence[int] | None = None) -> list[int]:
    """The tokens of a decode step, one for each row."""
    slots = range(len(rows)) if slots is None else slots
    sampler = Sampler(NUM_SLOTS, CPU)
    spans = []
    for row, slot in zip(rows, slots, strict=True):
        assign(sampler, slot, row)
        start = row.prompt_len + row.output_position - 1
        spans.append(Span(slot, slot, start, [0], num_logit_rows=1, sequence_length=start + 1))
    return sampler.sample(logits, pack(spans))


def sample_many(logits: Tensor, row: Row, num_positions: int) -> list[int]:
    """The first `num_positions` tokens of one sequence whose logits `[V]` are the same everywhere."""
    sampler = Sampler(1, CPU)
    assign(sampler, 0, row)
    start = row.prompt_len - 1
    span = Span(0, 0, start, [0] * num_positions, num_logit_rows=num_positions, sequence_length=start + num_positions)
    return sampler.sample(logits.expand(num_positions, -1), pack([span]))


def assign(sampler: Sampler, slot: int, row: Row) -> None:
    token_ids, stop_token_ids = [0] * (row.prompt_len + row.output_position), frozenset(row.stop_token_ids)
    sampler.assign(
        SlotAssignment(slot, slot, row.index, token_ids, row.prompt_len, row.params, row.seed, stop_token_ids)
    )


def assignment(slot: int, params: SamplingParams, prompt: Sequence[int] = (1,), **more: Any) -> SlotAssignment:
    """A new sequence in a slot."""
    return SlotAssignment(slot, slot, 0, prompt, len(prompt), params, **more)


def pack(spans: Sequence[Span]) -> RaggedBatch:
    return RaggedBatch.from_plan(StepPlan(tuple(spans), ()), block_size=16, device=CPU)


def random_logits(num_rows: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def of_transformers(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits `[V]` after transformers' processors, in the order of `model.generate`."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k > 0:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(None, logits[None])[0]
