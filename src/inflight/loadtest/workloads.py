"""The named workloads on which inflight is compared with other engines, given by their lengths. Standard library only.

`benchmarks/workloads.py` has the same workloads for engines that are not servers. Their Python environments cannot
import this package, so the lengths are written twice, and a test keeps them equal.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from inflight.loadtest.sketch import Sketch

NUM_REQUESTS = 32
LENGTH_SEED = 1234


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of given lengths.

    Attributes:
        lengths: prompt tokens (random) and output tokens of each request.
        num_prefix_tokens: length of a prefix that all prompts share.
    """

    lengths: list[tuple[int, int]]
    num_prefix_tokens: int = 0

    @property
    def sketches(self) -> list[Sketch]:
        return [Sketch(prompt, output) for prompt, output in self.lengths]


def _heavy_tailed() -> list[tuple[int, int]]:
    rng = random.Random(LENGTH_SEED)
    return [
        (rng.randint(16, 256), rng.randint(8, 32) if rng.random() < 0.75 else rng.randint(64, 160))
        for _ in range(NUM_REQUESTS)
    ]


WORKLOADS: Mapping[str, Workload] = {
    "W1": Workload([(7, 100 if number % 8 == 0 else 10) for number in range(NUM_REQUESTS)]),
    "W2": Workload(_heavy_tailed()),
    "W3": Workload([(16, 32)] * NUM_REQUESTS, num_prefix_tokens=512),
}
"""W1: outputs of 10 tokens, every eighth of 100. W2: heavy-tailed outputs. W3: a common prefix of 512 tokens."""
