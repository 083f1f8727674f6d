"""Compares every array of `RaggedBatch.from_plan` that a forward pass or the sampler reads with a loop over tokens."""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inflight.contracts.step.plan import BlockTable, Span, StepPlan
from inflight.execution.ragged_batch import RaggedBatch, ragged_arange

CPU = torch.device("cpu")


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, int]:
    """A step of random spans over random blocks in one or two cache groups, and its block size."""
    block_size = draw(st.integers(1, 8))
    spans = tuple(draw(st.lists(spans_of_one_sequence(), min_size=1, max_size=6)))
    groups = tuple(
        tuple(draw(block_tables(-(-span.end // block_size))) for span in spans) for _ in range(draw(st.integers(1, 2)))
    )
    return StepPlan(spans, groups), block_size


@st.composite
def spans_of_one_sequence(draw: st.DrawFn) -> Span:
    start = draw(st.integers(0, 30))
    token_ids = draw(st.lists(st.integers(0, 2**31), min_size=1, max_size=12))
    return Span(
        sequence_id=draw(st.integers(0, 2**40)),
        slot=draw(st.integers(0, 500)),
        start=start,
        token_ids=token_ids,
        num_logit_rows=draw(st.integers(0, len(token_ids))),
        sequence_length=start + len(token_ids) + draw(st.integers(0, 5)),
    )


@st.composite
def block_tables(draw: st.DrawFn, min_size: int) -> BlockTable:
    """Tables with at least the blocks that a span needs; a table may hold later blocks, too."""
    return array("i", draw(st.lists(st.integers(0, 10**6), min_size=min_size, max_size=min_size + 2)))


@given(plans())
def test_tokens_and_positions_are_those_of_the_concatenated_spans(drawn: tuple[StepPlan, int]) -> None:
    plan, block_size = drawn
    batch = RaggedBatch.from_plan(plan, block_size, CPU)
    input_ids, positions = [], []
    for span in plan.spans:
        for offset, token_id in enumerate(span.token_ids):
            input_ids.append(token_id)
            positions.append(span.start + offset)
    assert_tensor(batch.input_ids, input_ids, torch.int64)
    assert_tensor(batch.positions, positions, torch.int64)
    assert batch.num_tokens == plan.num_tokens == len(input_ids)


@given(plans())
def test_lengths_are_those_of_the_spans_and_of_their_visible_keys(drawn: tuple[StepPlan, int]) -> None:
    plan, block_size = drawn
    batch = RaggedBatch.from_plan(plan, block_size, CPU)
    kv_lens = [span.start + span.length for span in plan.spans]
    assert_host_array(batch.kv_lens_host, kv_lens, np.int64)
    assert_host_array(batch.query_lens_host, [len(span.token_ids) for span in plan.spans], np.int64)
    assert_host_array(batch.sequence_lens_host, [span.sequence_length for span in plan.spans], np.int64)


@given(plans())
def test_logit_rows_are_the_last_tokens_of_each_span(drawn: tuple[StepPlan, int]) -> None:
    plan, block_size = drawn
    batch = RaggedBatch.from_plan(plan, block_size, CPU)
    rows, slots, positions = [], [], []
    num_tokens = 0
    for span in plan.spans:
        for offset in range(span.length):
            if offset >= span.length - span.num_logit_rows:
                rows.append(num_tokens + offset)
                slots.append(span.slot)
                positions.append(span.start + offset)
        num_tokens += span.length
    assert_tensor(batch.logit_rows, rows, torch.int64)
    assert_host_array(batch.logit_slots_host, slots, np.int64)
    assert_host_array(batch.logit_positions_host, positions, np.int64)
    assert batch.num_logit_rows == len(rows)


@given(plans())
def test_each_token_is_written_through_its_sequences_table_in_every_cache_group(drawn: tuple[StepPlan, int]) -> None:
    plan, block_size = drawn
    batch = RaggedBatch.from_plan(plan, block_size, CPU)
    assert len(batch.groups) == len(plan.tables)
    for group, tables in zip(batch.groups, plan.tables, strict=True):
        cache_indices = [
            table[position // block_size] * block_size + position % block_size
            for span, table in zip(plan.spans, tables, strict=True)
            for position in range(span.start, span.end)
        ]
        assert_tensor(group.cache_indices, cache_indices, torch.int64)


@given(plans())
def test_block_tables_are_padded_to_the_longest_with_zeros(drawn: tuple[StepPlan, int]) -> None:
    plan, block_size = drawn
    batch = RaggedBatch.from_plan(plan, block_size, CPU)
    for group, tables in zip(batch.groups, plan.tables, strict=True):
        longest = max(len(table) for table in tables)
        padded = [list(table) + [0] * (longest - len(table)) for table in tables]
        assert_tensor(group.block_tables, padded, torch.int32)
        assert_host_array(group.block_tables_host, padded, np.int32)


def test_a_step_without_logits_has_empty_rows() -> None:
    spans = (Span(0, 3, 0, [5, 6], 0, sequence_length=9), Span(1, 4, 8, [7], 0, sequence_length=12))
    plan = StepPlan(spans, ((array("i", [2]), array("i", [1])),))
    batch = RaggedBatch.from_plan(plan, block_size=16, device=CPU)
    assert_tensor(batch.logit_rows, [], torch.int64)
    assert batch.num_logit_rows == len(batch.logit_slots_host) == len(batch.logit_positions_host) == 0


@pytest.mark.parametrize("kind", [list, tuple, lambda ids: array("i", ids), np.array])
def test_tokens_may_be_any_sequence_type(kind: type) -> None:
    plan = StepPlan((Span(0, 0, 0, kind([9, 8, 7]), 1, 3),), ((array("i", [0]),),))
    assert_tensor(RaggedBatch.from_plan(plan, 4, CPU).input_ids, [9, 8, 7], torch.int64)


@given(st.lists(st.integers(0, 9), max_size=8))
def test_ragged_arange_restarts_for_each_length(lengths: list[int]) -> None:
    counted = [i for length in lengths for i in range(length)]
    assert ragged_arange(np.array(lengths, dtype=np.int64)).tolist() == counted


def assert_tensor(actual: torch.Tensor, expected: Sequence[object], dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    assert actual.tolist() == expected


def assert_host_array(actual: np.ndarray, expected: Sequence[object], dtype: type) -> None:
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == dtype
    assert actual.tolist() == expected
