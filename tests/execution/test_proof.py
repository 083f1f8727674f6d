"""The proof harness itself: what it runs, and that it accepts only numbers that agree."""

from math import isnan, nan

import pytest
import torch

from inflight.contracts.api.errors import ModelError
from inflight.execution.preparation.agreement import worst
from inflight.execution.preparation.own_attention import make_executor
from inflight.execution.preparation.proof import CHUNKS, IN_A_ROW, IN_SHORT, PROOF, PlainModel, ProofWorkload, compare
from inflight.execution.preparation.proof_result import RunMode
from inflight.execution.ragged_batch import RaggedBatch
from tests import others, zoo


@pytest.mark.parametrize("workload", [PROOF, IN_A_ROW, IN_SHORT])
def test_every_token_of_each_prompt_runs_once_and_in_order(workload: ProofWorkload) -> None:
    done = [0, 0]
    for step in workload.steps:
        for number, start, end in step:
            assert done[number] == start < end
            done[number] = end
    assert tuple(done) == workload.lengths


@pytest.mark.parametrize("workload", [PROOF, IN_SHORT])
def test_spans_computed_at_once_like_generate_are_followed_by_decodes(workload: ProofWorkload) -> None:
    for number, length in enumerate(workload.prefill_lengths):
        spans = [(start, end) for step in workload.steps for each, start, end in step if each == number]
        assert length in {end for _, end in spans}
        assert all(end - start == 1 for start, end in spans if start >= length)


def test_chunks_are_spans_that_do_not_end_a_prompt() -> None:
    spans = {(number, end) for step in PROOF.steps for number, _, end in step}
    assert spans > CHUNKS
    assert not any(end == PROOF.lengths[number] for number, end in CHUNKS)


def test_prompts_run_together_as_they_do_alone() -> None:
    model = zoo.build("llama")
    alone, together = (PlainModel.run(model, IN_SHORT, together=each) for each in (False, True))
    assert alone.prompts == together.prompts
    torch.testing.assert_close(together.logits, alone.logits)


@pytest.mark.parametrize("errors", [[nan, 1.0], [1.0, nan, 2.0], [1.0, nan]])
def test_nan_is_the_worst_error(errors: list[float]) -> None:
    assert isnan(worst(errors))
    assert worst([1.0, 3.0, 2.0]) == 3.0


@pytest.mark.parametrize("slot", [0, 1])
def test_logits_that_are_not_numbers_do_not_agree(slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The NaNs are only in the last decode, or only in one pair of slots."""
    model = others.build("bloom")
    executor = make_executor(RunMode("rows"), model, block_size=4, num_slots=2)
    forward = executor.forward

    def spoiled(batch: RaggedBatch) -> torch.Tensor:
        is_last = len(batch.spans) == 1 and batch.spans[0].slot == slot
        return forward(batch) * (nan if is_last else 1)

    plain = PlainModel.run(model)
    assert compare(executor, plain, 2e-5) < 2e-5
    monkeypatch.setattr(executor, "forward", spoiled)
    with pytest.raises(ModelError, match="its logits differ by nan"):
        compare(executor, plain, 2e-5)
