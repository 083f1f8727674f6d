"""Preparation catches wrong attention, even in models whose logits hardly show it.

Broken attention is made in two ways: backends that get something wrong, and executors that are given wrong batches. The
logits of a model with transformers' default initialisation hardly show it, so it must be caught in such a model.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.execution.attention import AttentionSpec, TorchAttention, reference
from inflight.execution.attention.interface import KVStorage
from inflight.execution.preparation.report import PreparationReport
from inflight.execution.ragged_batch import RaggedBatch
from tests import zoo
from tests.execution.prepared_models import default_model, own_copy, prepare_own, report_of


class OtherSpec(TorchAttention):
    """Attends as if the model had asked for a different spec."""

    def __init__(self, block_size: int, dtype: torch.dtype, changes: dict[str, Any]) -> None:
        super().__init__(torch.device("cpu"), dtype, block_size)
        self.changes = changes

    def attend(self, query: Tensor, cache: KVStorage, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        spec = replace(spec, **self.changes)
        return super().attend(query, cache, spec, sinks if spec.has_sinks else None)


OTHER_SPECS = {
    "ignores the window": {"window": None},
    "drops the sinks": {"has_sinks": False},
    "wrong scale": {"scale": 1.0},
}


def sees_later_tokens(same_sequence: Tensor, later: Tensor) -> Tensor:
    return later


def sees_other_sequences(same_sequence: Tensor, later: Tensor) -> Tensor:
    return ~same_sequence


def sees_one_key_of_another(same_sequence: Tensor, later: Tensor) -> Tensor:
    return ~same_sequence & (torch.arange(same_sequence.shape[1]) == 0)


WIDER_MASKS = [sees_later_tokens, sees_other_sequences, sees_one_key_of_another]
"""Each gives the `[T, keys]` pairs that are wrongly visible."""


def restarts_positions(batch: RaggedBatch) -> RaggedBatch:
    starts = torch.from_numpy(batch.kv_lens_host - batch.query_lens_host)
    return replace(batch, positions=batch.positions - starts.repeat_interleave(torch.from_numpy(batch.query_lens_host)))


def gives_logits_of_the_token_before(batch: RaggedBatch) -> RaggedBatch:
    return replace(batch, logit_rows=(batch.logit_rows - 1).clamp(min=0))


def writes_in_the_wrong_order(batch: RaggedBatch) -> RaggedBatch:
    group = batch.groups[0]
    return replace(batch, groups=(replace(group, cache_indices=group.cache_indices.flip(0)),))


def reads_its_blocks_in_the_wrong_order(batch: RaggedBatch) -> RaggedBatch:
    group = batch.groups[0]
    tables = group.block_tables_host.copy()
    tables[:, :2] = group.block_tables_host[:, [1, 0]]
    return replace(batch, groups=(replace(group, block_tables_host=tables),))


def reads_a_block_of_another(batch: RaggedBatch) -> RaggedBatch:
    group = batch.groups[0]
    tables = group.block_tables_host.copy()
    tables[:, 0] = tables[0, 0]
    return replace(batch, groups=(replace(group, block_tables_host=tables),))


OTHER_BATCHES = [
    gives_logits_of_the_token_before,
    writes_in_the_wrong_order,
    reads_its_blocks_in_the_wrong_order,
    reads_a_block_of_another,
]


def prepare_with_other_spec(model: PreTrainedModel, changes: dict[str, Any]) -> PreparationReport:
    return prepare_own(own_copy(model), lambda block_size: OtherSpec(block_size, model.dtype, changes))


def prepare_with_wider_mask(model: PreTrainedModel, also_seen: Callable[[Tensor, Tensor], Tensor]) -> PreparationReport:
    correct = reference.ragged_mask

    def mask(
        batch: RaggedBatch, window: int | None = None, chunk: int | None = None, *, is_causal: bool = True
    ) -> Tensor:
        query_spans = torch.arange(len(batch.kv_lens_host)).repeat_interleave(torch.from_numpy(batch.query_lens_host))
        key_spans = torch.arange(len(batch.kv_lens_host)).repeat_interleave(torch.from_numpy(batch.kv_lens_host))
        same_sequence = query_spans[:, None] == key_spans
        return correct(batch, window, chunk, is_causal=is_causal) | also_seen(
            same_sequence, same_sequence & ~correct(batch)
        )

    with mock.patch.object(reference, "ragged_mask", mask):
        return report_of(model, "reference")


def prepare_with_other_batch(model: PreTrainedModel, change: Callable[[RaggedBatch], RaggedBatch]) -> PreparationReport:
    pack = RaggedBatch.from_plan
    with mock.patch.object(RaggedBatch, "from_plan", lambda *args: change(pack(*args))):
        return report_of(model, "reference")


def refusal() -> Any:
    """The refusal must come from what the model computed, not from an error on the way."""
    return pytest.raises(ModelError, match=r"^\w+ (?!cannot run as a packed row: \w+Error)")


INSENSITIVE = ["llama", "gpt2", "gpt_oss"]
"""GPT-OSS has every mechanism that can be ignored: windows, sinks, a scale."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", OTHER_SPECS)
def test_a_backend_that_misses_a_mechanism_is_caught_on_an_insensitive_model(change: str, dtype: torch.dtype) -> None:
    model = default_model(zoo.ARCHITECTURES["gpt_oss"]()).to(dtype)
    with refusal():
        prepare_with_other_spec(model, OTHER_SPECS[change])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("also_seen", WIDER_MASKS)
@pytest.mark.parametrize("name", INSENSITIVE)
def test_attention_that_sees_too_much_is_caught_on_an_insensitive_model(
    name: str, also_seen: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    model = default_model(zoo.ARCHITECTURES[name]()).to(dtype)
    with refusal():
        prepare_with_wider_mask(model, also_seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", OTHER_BATCHES)
@pytest.mark.parametrize("name", INSENSITIVE)
def test_a_wrong_batch_is_caught_on_an_insensitive_model(
    name: str, change: Callable[[RaggedBatch], RaggedBatch], dtype: torch.dtype
) -> None:
    model = default_model(zoo.ARCHITECTURES[name]()).to(dtype)
    with refusal():
        prepare_with_other_batch(model, change)


@pytest.mark.parametrize("name", INSENSITIVE)
def test_positions_that_restart_with_each_chunk_are_caught_on_an_insensitive_model(name: str) -> None:
    """This needs float32: rounding to bfloat16 is as large as the effect of rotary positions on such a model."""
    with refusal():
        prepare_with_other_batch(default_model(zoo.ARCHITECTURES[name]()), restarts_positions)


@pytest.mark.parametrize("changes", [{"scale": 0.25 * 1.1}, {"window": zoo.WINDOW + 1}], ids=str)
def test_a_slightly_wrong_mechanism_is_caught_on_an_insensitive_model(changes: dict[str, Any]) -> None:
    with refusal():
        prepare_with_other_spec(default_model(zoo.ARCHITECTURES["gpt_oss"]()), changes)


def test_a_missing_softcap_is_caught_if_it_matters() -> None:
    """The scores of a default-initialised model are too small to be capped, so they are correct without a cap."""
    with refusal():
        prepare_with_other_spec(zoo.build("gemma2"), {"softcap": None})
