"""Whether samples fit a distribution."""

import numpy as np

ALPHA_QUANTILE = 3.719  # of the standard normal distribution: chi-square tests fail by chance once in 10,000


def chi_square_limit(degrees_of_freedom: int) -> float:
    """The value that chi-square exceeds with probability 1e-4 (Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * degrees_of_freedom)
    return degrees_of_freedom * (1 - spread + ALPHA_QUANTILE * spread**0.5) ** 3


def assert_fits(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square goodness of fit. Outcomes expected fewer than 10 times are pooled."""
    assert not counts[probabilities == 0].any(), "an impossible outcome happened"
    expected = probabilities * counts.sum()
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
        if expected[-1] < 10:
            counts, expected = counts[:-1], expected[:-1]
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < chi_square_limit(len(expected) - 1)
