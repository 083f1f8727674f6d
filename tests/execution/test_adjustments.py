"""Changes to the logits of a sequence: like transformers if it has them, otherwise by definition."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor

from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.plan import SlotAssignment, Span, StepPlan
from inflight.engine.admission import by_beginning
from inflight.execution.ragged_batch import RaggedBatch
from inflight.execution.sampling.adjustments import NO_EDITS, Adjuster, adjust
from inflight.execution.sampling.sampler import INVALID_TOKEN, Sampler
from tests.execution.sampled_rows import assignment

VOCAB_SIZE = 40
tokens = st.integers(0, VOCAB_SIZE - 1)


def random_logits(num_rows: int = 1, seed: int = 0) -> Tensor:
    return 4 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def adjusted(logits: Tensor, *adjusters: Adjuster) -> Tensor:
    logits = logits.clone()
    adjust(logits, [adjuster.edits() or NO_EDITS for adjuster in adjusters])
    return logits


def adjuster_of(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int] = (), num_known: int = 0, **more: object
) -> Adjuster:
    """An adjuster assigned with `num_known` output tokens, which then saw the others arrive."""
    token_ids = [*prompt, *output[:num_known]]
    adjuster = Adjuster(SlotAssignment(0, 0, 0, token_ids, len(prompt), params, **more))  # type: ignore[arg-type]
    for position, token_id in enumerate(output[num_known:], len(prompt) + num_known):
        adjuster.observe(position, token_id)
    return adjuster


@given(
    prompt=st.lists(tokens, min_size=1, max_size=100),
    output=st.lists(tokens, max_size=100),
    penalty=st.sampled_from([0.3, 0.9, 1.1, 2.0]),
    num_known=st.integers(0, 100),
)
def test_the_repetition_penalty_matches_transformers(
    prompt: list[int], output: list[int], penalty: float, num_known: int
) -> None:
    logits = random_logits()
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*prompt, *output]]), logits.clone())
    params = SamplingParams(repetition_penalty=penalty)
    assert torch.equal(adjusted(logits, adjuster_of(params, prompt, output, num_known)), expected)


@given(
    prompt=st.lists(tokens, min_size=1, max_size=20),
    output=st.lists(tokens, max_size=200),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
)
def test_presence_and_frequency_penalties_count_only_the_output(
    prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    logits = random_logits()
    expected = logits.double().clone()
    for token_id, count in Counter(output).items():
        expected[0, token_id] -= frequency * count + presence
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    torch.testing.assert_close(adjusted(logits, adjuster_of(params, prompt, output)), expected.float())


@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=4),
    output=st.lists(st.integers(0, 2), max_size=8),
)
def test_bad_words_match_transformers(words: list[list[int]], output: list[int]) -> None:
    """Transformers looks at the whole row, so the prompt here contains no part of a bad word."""
    logits = random_logits()
    expected = NoBadWordsLogitsProcessor(words)(torch.tensor([[9, *output]]), logits.clone())
    bad_words = by_beginning(map(tuple, words))
    adjuster = adjuster_of(SamplingParams(bad_words=["x"]), [9], output, bad_words=bad_words)
    assert torch.equal(adjusted(logits, adjuster), expected)


def test_a_bad_word_does_not_begin_in_the_prompt() -> None:
    params, bad_words = SamplingParams(bad_words=["x"]), by_beginning([(5, 6)])
    assert torch.isfinite(adjusted(random_logits(), adjuster_of(params, [5], [], bad_words=bad_words))).all()
    assert adjusted(random_logits(), adjuster_of(params, [1], [5], bad_words=bad_words))[0, 6] == -torch.inf


def test_all_adjustments_are_applied_in_order_and_per_row() -> None:
    logits = random_logits(3)
    params = SamplingParams(
        bad_words=["x"],
        min_tokens=3,
        logit_bias={3: 50.0, 7: -50.0, 8: 9.0},
        repetition_penalty=2.0,
        presence_penalty=1.0,
    )
    first = adjuster_of(params, [3, 4], [7], stop_token_ids=[8], bad_words=by_beginning([(7, 9)]))
    second = adjuster_of(SamplingParams(logit_bias={0: 1.0}), [1])
    third = adjuster_of(SamplingParams(), [1])
    expected = logits.clone()
    for token_id in (3, 4, 7):
        biased = expected[0, token_id] + {3: 50.0, 7: -50.0}.get(token_id, 0.0)
        expected[0, token_id] = (biased / 2 if biased > 0 else biased * 2) - float(token_id == 7)
    expected[0, [8, 9]] = -torch.inf  # min_tokens: no bias allows it
    expected[1, 0] += 1
    assert torch.equal(adjusted(logits, first, second, third), expected)


def test_a_token_is_counted_once_even_if_its_step_is_repeated() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    once, again = adjuster_of(params, [1], [5, 5, 6]), adjuster_of(params, [1], [5, 5, 6])
    for position, token_id in ((1, 5), (2, 5), (3, 6)):
        again.observe(position, token_id)
    assert torch.equal(adjusted(random_logits(), once), adjusted(random_logits(), again))


def decode(
    sampler: Sampler, logits: Tensor, slots: Sequence[int], position: int, token_ids: Sequence[int]
) -> list[int]:
    spans = [Span(slot, slot, position, [token], 1, position + 1) for slot, token in zip(slots, token_ids, strict=True)]
    return sampler.sample(logits, RaggedBatch.from_plan(StepPlan(tuple(spans), ()), 16, torch.device("cpu")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sampler_changes_only_the_rows_with_adjustments(dtype: torch.dtype) -> None:
    """Compares a loop of greedy decodes with each sequence computed by hand."""
    all_params = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, frequency_penalty=2.0),
        SamplingParams(temperature=0, repetition_penalty=3.0),
        SamplingParams(temperature=0, logit_bias={11: 100.0}),
    ]
    logits = random_logits(len(all_params), seed=3).to(dtype)
    sampler, prompt = Sampler(8, torch.device("cpu")), [0]
    slots, token_ids = [5, 0, 3, 1], [0] * 4
    for slot, params in zip(slots, all_params, strict=True):
        sampler.assign(assignment(slot, params, prompt))
    adjusters = [adjuster_of(params, prompt) for params in all_params]
    seen: list[tuple[int, ...]] = []
    for position in range(12):
        for adjuster, token_id in zip(adjusters, token_ids, strict=True):
            adjuster.observe(position, token_id)
        token_ids = decode(sampler, logits, slots, position, token_ids)
        assert token_ids == adjusted(logits.float(), *adjusters).argmax(-1).tolist()
        seen.append(tuple(token_ids))
    plain, frequent, repeated, biased = zip(*seen, strict=True)
    assert set(plain) == {int(logits[0].argmax())}
    assert set(biased) == {11}
    assert len(set(frequent)) > 1
    assert len(set(repeated)) > 1


def test_a_row_without_allowed_tokens_is_invalid_and_its_neighbour_is_not() -> None:
    sampler = Sampler(2, torch.device("cpu"))
    everything = {(): range(VOCAB_SIZE)}
    sampler.assign(assignment(0, SamplingParams(bad_words=["x"]), [1], bad_words=everything))
    sampler.assign(assignment(1, SamplingParams(), [1]))
    first, second = decode(sampler, random_logits(2), [0, 1], 0, [1, 1])
    assert first == INVALID_TOKEN
    assert second in range(VOCAB_SIZE)


def test_a_new_sequence_in_a_slot_inherits_nothing_from_the_old_one() -> None:
    sampler, logits = Sampler(1, torch.device("cpu")), random_logits()
    best = int(logits.argmax())
    params = SamplingParams(temperature=0, logit_bias={best: -100.0})
    sampler.assign(assignment(0, params, [1]))
    assert decode(sampler, logits, [0], 0, [1]) != [best]
    sampler.assign(assignment(0, SamplingParams(temperature=0), [1]))
    assert decode(sampler, logits, [0], 0, [1]) == [best]
    assert np.isfinite(logits).all()
