"""Log-probabilities equal those of torch, in any batch of rows."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.contracts.api.outputs import TokenScore
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.plan import Span, StepPlan
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.sampling.logprobs import ROWS_AT_ONCE, Scorer, score_rows
from tests.execution.sampled_rows import assignment

VOCAB_SIZE = 3000


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    return 5 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def scores_of(
    logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenScore]:
    return score_rows(logits, np.array(rows), np.array(token_ids), np.array(num_top))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_log_softmax(dtype: torch.dtype) -> None:
    logits = random_logits(9).to(dtype)
    expected = torch.log_softmax(logits.double(), dim=-1)
    rows, token_ids, num_top = [7, 0, 3, 3], [5, 2999, 17, 18], [0, 3, 20, 1]
    for row, token_id, number, score in zip(
        rows, token_ids, num_top, scores_of(logits, rows, token_ids, num_top), strict=True
    ):
        assert score.logprob == pytest.approx(float(expected[row, token_id]), abs=1e-5)
        assert score.rank == int((logits[row] > logits[row, token_id]).sum()) + 1
        assert len(score.top_token_ids) == len(score.top_logprobs) == number
        assert score.top_logprobs == pytest.approx(expected[row].topk(number).values.tolist(), abs=1e-5)
        assert expected[row, score.top_token_ids].tolist() == pytest.approx(score.top_logprobs, abs=1e-5)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_score_of_a_row_has_the_same_bits_in_any_batch(num_threads: int) -> None:
    before = torch.get_num_threads()
    logits = 5 * torch.randn(40, 50257, generator=torch.Generator().manual_seed(1))
    try:
        torch.set_num_threads(num_threads)
        together = scores_of(logits, range(40), range(40), [3] * 40)
        for row, score in enumerate(together):
            assert scores_of(logits, [row], [row], [3]) == [score]
            assert scores_of(logits[row : row + 1].clone(), [0], [row], [3]) == [score]
    finally:
        torch.set_num_threads(before)


def test_ties_go_to_lower_ids_however_many_a_neighbour_asks_for() -> None:
    """In bfloat16 there are ties at almost every place."""
    logits = random_logits(12).bfloat16()
    for number in (1, 2, 5, 20):
        alone = [scores_of(logits, [row], [0], [number])[0] for row in range(12)]
        assert (
            scores_of(logits, range(12), [0] * 12, [number if row % 2 else 20 for row in range(12)])[1::2]
            == alone[1::2]
        )
        for row, score in enumerate(alone):
            by_value = sorted(range(VOCAB_SIZE), key=lambda token_id: (-float(logits[row, token_id]), token_id))
            assert score.top_token_ids == by_value[:number]


def test_more_top_tokens_than_the_vocabulary_has_give_all_tokens() -> None:
    (score,) = scores_of(torch.zeros(1, 4), [0], [2], [1000])
    assert sorted(score.top_token_ids) == [0, 1, 2, 3]


def test_only_rows_that_request_scores_are_scored_in_slices() -> None:
    """Covers a scored prompt, an unscored one, and decodes of both kinds."""
    length = ROWS_AT_ONCE + 40
    scorer = Scorer(4)
    wishes = [{"prompt_logprobs": 2}, {"logprobs": 1}, {}, {"logprobs": 0, "prompt_logprobs": 0}]
    for slot, wish in enumerate(wishes):
        scorer.assign(assignment(slot, SamplingParams(**wish)))  # type: ignore[arg-type]
    prompt = list(range(length))
    spans = (
        Span(0, 0, 0, prompt, length, length, scored_ids=prompt[1:]),
        Span(1, 1, 9, [5], 1, 10),
        Span(2, 2, 9, [5], 1, 10),
        Span(3, 3, 0, [5, 6], 2, 2, scored_ids=[6]),
    )
    batch = RaggedBatch.from_plan(StepPlan(spans, ()), 16, torch.device("cpu"))
    logits = random_logits(batch.num_logit_rows)
    token_ids = [*prompt[1:], 1, 2, 3, 6, 4]
    scores = scorer.score(logits, batch, token_ids)
    assert sorted(scores) == [*range(length - 1), length, length + 2, length + 3]
    expected = torch.log_softmax(logits, dim=-1)
    for row, score in scores.items():
        assert score.logprob == pytest.approx(float(expected[row, token_ids[row]]), abs=1e-5)
    assert [len(scores[row].top_token_ids) for row in (0, length, length + 2, length + 3)] == [2, 1, 0, 0]
    scorer.release([0, 3])
    assert sorted(scorer.score(logits, batch, token_ids)) == [length]
