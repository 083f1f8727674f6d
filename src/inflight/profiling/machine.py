"""This machine's ceilings: memory bandwidth and matrix throughput.

Both are measured with the current number of torch threads, repeatedly and between the other measurements, so that
changes in the machine's speed affect all alike; the medians count. Knows no model and no step.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from inflight.execution.weights.formats import WeightFormat

MIN_READ_BYTES = 256 * 2**20
MAX_READ_BYTES = 2 * 2**30
CACHES_TO_OVERFLOW = 4
DEFAULT_LAST_LEVEL_CACHE_BYTES = 32 * 2**20
LINEAR_ROWS, LINEAR_SIZE = 512, 2048


@dataclass(frozen=True, slots=True)
class Machine:
    """The two ceilings of a roofline.

    Attributes:
        read_bytes_per_second: for memory that is in no cache.
        operations_per_second: multiplications plus additions of a large linear layer.
    """

    read_bytes_per_second: float
    operations_per_second: float


class MachineMeter:
    """Measures this machine, a little at each call of `measure`.

    Reading means summing a buffer several times as large as the last-level cache, or finding its maximum, whichever is
    faster. Arithmetic means a linear layer of 512 rows with 2,048 by 2,048 weights.

    Args:
        dtype: the dtype of the linear layer.
        weight_format: the format of its prepacked weights; None: they are not prepacked.
    """

    def __init__(self, dtype: torch.dtype, weight_format: WeightFormat | None) -> None:
        num_bytes = min(max(MIN_READ_BYTES, CACHES_TO_OVERFLOW * last_level_cache_bytes()), MAX_READ_BYTES)
        integers = torch.ones(num_bytes // 8, dtype=torch.int64)
        floats = integers.view(torch.float32)
        rows = torch.ones(LINEAR_ROWS, LINEAR_SIZE, dtype=dtype)
        weight = torch.ones(LINEAR_SIZE, LINEAR_SIZE, dtype=dtype)
        prepacked = weight_format and weight_format.prepack_linear(weight, None)
        linear = prepacked or (lambda x: functional.linear(x, weight))
        self._num_bytes = num_bytes
        self._readers: list[Callable[[], object]] = [lambda: integers.sum(), lambda: floats.amax()]
        self._read_seconds: list[list[float]] = [[] for _ in self._readers]
        self._multiply: Callable[[], object] = lambda: linear(rows)
        self._multiply_seconds: list[float] = []
        self.measure()
        for seconds in (*self._read_seconds, self._multiply_seconds):
            seconds.clear()

    @torch.inference_mode()
    def measure(self) -> None:
        """Take one more reading of both."""
        for reader, seconds in zip(self._readers, self._read_seconds, strict=True):
            seconds.append(_seconds(reader))
        self._multiply_seconds.append(_seconds(self._multiply))

    def machine(self) -> Machine:
        """Return the medians of all readings (there must be at least one)."""
        num_operations = 2 * LINEAR_ROWS * LINEAR_SIZE**2
        return Machine(
            read_bytes_per_second=self._num_bytes / min(map(statistics.median, self._read_seconds)),
            operations_per_second=num_operations / statistics.median(self._multiply_seconds),
        )


def last_level_cache_bytes() -> int:
    """Return the size of the first processor's largest cache, as reported by Linux; 32 MiB if it is not reported."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [DEFAULT_LAST_LEVEL_CACHE_BYTES]
    try:
        texts = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        sizes = [int(text[:-1]) * units[text[-1]] for text in texts] or sizes
    except (OSError, ValueError, KeyError, IndexError):
        pass
    return max(sizes)


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
