"""`PrefillLimit`: learns from the durations that it is shown, and from nothing else."""

import pytest

from inflight.engine.prefill_limit import MIN_TOKENS, PrefillLimit


def test_it_allows_everything_until_it_has_seen_decodes_and_prefills() -> None:
    limit = PrefillLimit()
    assert limit.num_tokens is None
    limit.see(num_decodes=8, num_prefill_tokens=0, seconds=0.010)
    assert limit.num_tokens is None
    limit.see(num_decodes=0, num_prefill_tokens=100, seconds=0.1)
    assert limit.num_tokens is not None


@pytest.mark.parametrize("stretch", [0.5, 1.0, 4.0])
def test_it_finds_the_number_of_tokens_that_stretches_a_step_so_far(stretch: float) -> None:
    limit = PrefillLimit(stretch)
    for tokens in (50, 80, 200) * 20:
        limit.see(8, 0, 0.040)
        limit.see(8, tokens, 0.040 + 0.0005 * tokens)
    assert limit.num_tokens == pytest.approx(stretch * 0.040 / 0.0005, rel=0.02)


def test_it_never_goes_below_what_would_not_pay() -> None:
    limit = PrefillLimit()
    limit.see(8, 0, 0.001)
    limit.see(8, 100, 10.0)
    assert limit.num_tokens == MIN_TOKENS


def test_a_few_prefill_tokens_teach_nothing() -> None:
    limit = PrefillLimit()
    limit.see(8, 0, 0.040)
    limit.see(8, MIN_TOKENS - 1, 0.5)
    assert limit.num_tokens is None
