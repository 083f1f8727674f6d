"""Attention kernels let the tokens of an item, such as an image, see each other."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from inflight.contracts.step.plan import Span, StepPlan
from inflight.execution.attention import AttentionSpec, CpuAttention
from inflight.execution.attention.reference import dense_attention
from inflight.execution.ragged_batch import RaggedBatch
from tests.execution.paged_world import CPU

LENGTH, ITEM = 330, (40, 300)
"""The item reaches over the border of a tile of 256 keys."""
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, value_head_size=8, scale=0.3)


def batch_of(start: int, end: int, beside: int) -> RaggedBatch:
    """A step that runs tokens `[start, end)` of a sequence after `beside` tokens of another one."""
    given = [(1, 0, beside)] * (beside > 0) + [(0, start, end)]
    spans = tuple(Span(number, number, first, [0] * (last - first), 0, last) for number, first, last in given)
    tables = tuple(array("i", range(30 * number, 30 * number + 30)) for number, *_ in given)
    batch = RaggedBatch.from_plan(StepPlan(spans, (tables,)), 16, CPU)
    return batch.with_items([[ITEM] if span.slot == 0 else [] for span in spans])


def attended(
    spec: AttentionSpec, dtype: torch.dtype, steps: Sequence[tuple[int, int, int]], *, sees_items: bool = True
) -> torch.Tensor:
    """The outputs `[LENGTH, H, Dv]` of the sequence's tokens, run in these steps."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(LENGTH, heads, 8, generator=generator).to(dtype) for heads in (4, 2, 2))
    backend = CpuAttention(dtype, 16)
    cache = backend.allocate(60, spec)
    if sees_items:
        torch.ops.inflight.see_items(cache.call)
    outputs = []
    for start, end, beside in steps:
        backend.begin_step(batch_of(start, end, beside))
        rows = [torch.cat([torch.ones(beside, *each.shape[1:], dtype=dtype), each[start:end]]) for each in (key, value)]
        backend.write(cache, rows[0], rows[1], spec)
        queries = torch.cat([torch.ones(beside, 4, 8, dtype=dtype), query[start:end]])
        outputs.append(backend.attend(queries, cache, spec, None)[beside:])
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 280])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_an_item_see_all_of_it(window: int | None, dtype: torch.dtype) -> None:
    spec = replace(SPEC, window=window)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(LENGTH, heads, 8, generator=generator).to(dtype) for heads in (4, 2, 2))
    place = torch.arange(LENGTH)
    is_item = (place >= ITEM[0]) & (place < ITEM[1])
    allowed = (place[:, None] >= place) | (is_item[:, None] & is_item)
    if window is not None:
        allowed &= place[:, None] - place < window
    given = (each.float().transpose(0, 1) for each in (query, key, value))
    expected = dense_attention(*given, allowed, spec, None).transpose(0, 1)
    whole = attended(spec, dtype, [(0, LENGTH, 0)])
    assert (whole.float() - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 1e-2)
    causal = attended(spec, dtype, [(0, LENGTH, 0)], sees_items=False)
    assert not torch.equal(causal[ITEM[0] : ITEM[1]], whole[ITEM[0] : ITEM[1]])
    assert torch.equal(causal[ITEM[1] :], whole[ITEM[1] :])


def test_an_item_has_the_same_bits_in_any_company_and_cut() -> None:
    whole = attended(SPEC, torch.float32, [(0, LENGTH, 0)])
    for steps in ([(0, 40, 3), (40, 300, 20), (300, LENGTH, 1)], [(0, 17, 0), (17, 300, 200), (300, 301, 5)]):
        outputs = attended(SPEC, torch.float32, steps)
        assert torch.equal(outputs, whole[: len(outputs)])
