"""The results of a comparison as data, and the figures derived from them: medians, spread, ratios, percentiles.

Knows neither how they were measured nor how they are shown.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.catalogue import OURS
from benchmarks.peers.protocol import Loaded, Measured

MEBIBYTE = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """A median and its spread."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def from_samples(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass(frozen=True, slots=True)
class PeerRuns:
    """One peer on one workload: what it loaded, and its rounds in order."""

    peer: str
    loaded: Loaded
    rounds: list[Measured]

    @property
    def tokens_per_second(self) -> Spread:
        """Output tokens per second, from submission until all requests were done."""
        return Spread.from_samples([_rate(measured) for measured in self.rounds])

    @property
    def cores_of_others(self) -> float:
        """Cores that other processes used, in the most disturbed round."""
        return max(measured.cores_of_others for measured in self.rounds)

    @property
    def peak_memory(self) -> float:
        """The most MiB resident in any round."""
        return max(measured.peak_memory for measured in self.rounds) / MEBIBYTE

    def first_token_seconds(self, share: float) -> float:
        """Return the percentile `share` (0 to 1) of time to first token, over all requests of all rounds."""
        return percentile([each.first_token_seconds for run in self.rounds for each in run.requests], share)

    def latency_seconds(self, share: float) -> float:
        """Return the same percentile of the time from submission to a request's end."""
        return percentile([each.seconds for run in self.rounds for each in run.requests], share)


@dataclasses.dataclass(frozen=True, slots=True)
class CellResult:
    """One workload: the peers that ran it, and those that did not, with the reasons."""

    workload: str
    description: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_slots: int
    runs: list[PeerRuns]
    left_out: dict[str, str]

    def ours(self) -> PeerRuns | None:
        return next((runs for runs in self.runs if runs.peer == OURS), None)

    def ratio(self, other: PeerRuns) -> Spread | None:
        """Return inflight's speed divided by `other`'s, round by round; None if inflight did not run."""
        ours = self.ours()
        if ours is None or other.peer == OURS:
            return None
        return Spread.from_samples([_rate(a) / _rate(b) for a, b in zip(ours.rounds, other.rounds, strict=True)])


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """A whole comparison. `machine` says where it was measured, `setting` how."""

    model: str
    dtype: str
    quantization: str | None
    setting: dict[str, str]
    machine: dict[str, str]
    cells: list[CellResult]

    @property
    def name(self) -> str:
        """The name for titles and file names."""
        return "-".join(filter(None, [self.model, self.dtype, self.quantization]))

    def as_data(self) -> dict[str, Any]:
        """Return all measurements and the figures of the report, for JSON."""
        data = dataclasses.asdict(self)
        for cell, cell_data in zip(self.cells, data["cells"], strict=True):
            for runs, runs_data in zip(cell.runs, cell_data["runs"], strict=True):
                ratio = cell.ratio(runs)
                runs_data["summary"] = {
                    "output_tokens_per_second": dataclasses.asdict(runs.tokens_per_second),
                    "inflight_ratio": dataclasses.asdict(ratio) if ratio else None,
                    "peak_memory_mib": runs.peak_memory,
                    "cores_of_others": runs.cores_of_others,
                    "first_token_seconds": {f"p{p}": runs.first_token_seconds(p / 100) for p in (50, 95)},
                    "latency_seconds": {f"p{p}": runs.latency_seconds(p / 100) for p in (50, 95)},
                }
        return data


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of `values` does not exceed, interpolated linearly between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _rate(measured: Measured) -> float:
    return sum(request.num_output_tokens for request in measured.requests) / measured.seconds
