"""`PrefillLimit` learns only from the durations that it observes."""

import pytest

from inflight.engine.step_feedback import BACKGROUND_TOKENS, MIN_TOKENS, PrefillLimit


def test_prefills_are_unlimited_until_decodes_and_prefills_were_observed() -> None:
    limit = PrefillLimit()
    assert limit.num_tokens(8) is None
    limit.observe(num_decodes=8, num_prefill_tokens=0, seconds=0.010)
    assert limit.num_tokens(8) is None
    limit.observe(num_decodes=0, num_prefill_tokens=100, seconds=0.1)
    assert limit.num_tokens(8) is not None


@pytest.mark.parametrize("stretch", [0.5, 1.0, 4.0])
def test_prefills_at_the_limit_lengthen_a_step_by_the_given_factor(stretch: float) -> None:
    limit = PrefillLimit(stretch)
    for tokens in (50, 80, 200) * 20:
        limit.observe(8, 0, 0.040)
        limit.observe(8, tokens, 0.040 + 0.0005 * tokens)
    assert limit.num_tokens(8) == pytest.approx(stretch * 0.040 / 0.0005, rel=0.02)


def test_the_limit_has_a_minimum() -> None:
    limit = PrefillLimit()
    limit.observe(8, 0, 0.001)
    limit.observe(8, 100, 10.0)
    assert limit.num_tokens(8) == MIN_TOKENS


def test_a_step_in_the_background_is_short_or_has_few_tokens() -> None:
    limit = PrefillLimit()
    assert limit.num_tokens(0, in_background=True) == BACKGROUND_TOKENS
    limit.observe(8, 0, 0.02)
    limit.observe(0, 100, 0.1)
    assert limit.num_tokens(0, in_background=True) == 100
    assert limit.num_tokens(8, in_background=True) == pytest.approx(80, abs=1)
    slow = PrefillLimit()
    slow.observe(8, 0, 2.0)
    slow.observe(0, 100, 50.0)
    assert slow.num_tokens(8, in_background=True) == BACKGROUND_TOKENS


def test_a_limit_that_was_wrong_does_not_stay_so() -> None:
    """No step is one of decodes alone again after the first, so what many decodes take is never seen."""
    limit = PrefillLimit()
    limit.observe(1, 0, 0.001)
    num_prefills = 0
    for _ in range(20):
        num_prefills = min(limit.num_tokens(30) or 1000, 1000)
        limit.observe(30, num_prefills, 0.001 + 0.0001 * (30 + num_prefills))
    assert num_prefills >= 60


def test_steps_with_few_prefill_tokens_do_not_change_the_limit() -> None:
    limit = PrefillLimit()
    limit.observe(8, 0, 0.040)
    limit.observe(8, MIN_TOKENS - 1, 0.5)
    assert limit.num_tokens(8) is None
