"""When requests arrive. Decides the times from a rate, its burstiness and a seed; knows no requests."""

import math

import numpy as np


def arrival_times(
    num_requests: int, rate: float, *, burstiness: float = 1.0, burst_size: int = 1, seed: int = 0
) -> list[float]:
    """Return when requests arrive, in seconds after the start, the first at 0.

    Args:
        rate: requests per second, on average; infinity: all at once.
        burstiness: the shape of the gamma distribution of the gaps. 1: requests arrive independently of each other
            (Poisson); below 1: in clusters; above 1: more evenly.
        burst_size: how many requests arrive together; the gaps are between such bursts.

    Raises:
        ValueError: an argument is not above 0.
    """
    for name, value in (("the request rate", rate), ("the burstiness", burstiness), ("the burst size", burst_size)):
        if not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    if math.isinf(rate):
        return [0.0] * num_requests
    num_bursts = math.ceil(num_requests / burst_size)
    mean_gap = burst_size / rate
    gaps = np.random.default_rng((seed, 1)).gamma(burstiness, mean_gap / burstiness, max(0, num_bursts - 1))
    starts: list[float] = np.concatenate(([0.0], np.cumsum(gaps))).tolist()
    return [starts[number // burst_size] for number in range(num_requests)]
