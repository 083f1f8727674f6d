"""`RunReport`: a run in numbers, the same for recorded and simulated runs.

Times are in seconds. A sequence's time to first token (TTFT) and latency count from its request's arrival to the end of
the step that made its first and its last token; its time per output token (TPOT) is measured between these two.
"""

from array import array
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.table import Column, Table

from inflight.observe.recorder import Recording

QUANTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of times in seconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def from_values(cls, values: "array[float]") -> "Percentiles":
        """Return the percentiles of `values`; zeros if there are none."""
        if not values:
            return cls(0.0, 0.0, 0.0)
        return cls(*(float(value) for value in np.percentile(np.frombuffer(values, dtype=np.float32), QUANTILES)))


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run in numbers.

    Attributes:
        num_sequences: sequences that got their first token.
        num_prompt_tokens, num_cached_tokens: prompt tokens of admitted sequences, and how many were in the cache.
        num_output_tokens: generated tokens.
        seconds: from the first request's arrival to the end of the last step.
        time_to_first_token, time_per_output_token, latency: percentiles over sequences.
        occupancy: the share of all slots, over all steps, in which a sequence ran.
        mean_blocks_used, peak_blocks_used: used blocks out of `num_blocks`; the mean is over time.
        num_draft_tokens, num_accepted_tokens: draft tokens verified, and accepted.
    """

    num_sequences: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    seconds: float
    time_to_first_token: Percentiles
    time_per_output_token: Percentiles
    latency: Percentiles
    num_preemptions: int
    occupancy: float
    mean_blocks_used: float
    peak_blocks_used: int
    num_blocks: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def output_tokens_per_second(self) -> float:
        """Throughput of generated tokens."""
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def total_tokens_per_second(self) -> float:
        """Throughput of prompt and generated tokens; prompt tokens count whether they were cached or not."""
        return (self.num_prompt_tokens + self.num_output_tokens) / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that came from the cache."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        rates = ("output_tokens_per_second", "total_tokens_per_second", "hit_rate")
        return asdict(self) | {name: getattr(self, name) for name in rates}

    def table(self) -> Table:
        """Return the report as a table for a terminal."""
        table = Table.grid(Column(style="dim"), "", padding=(0, 2))
        rows = {
            "wall time": f"{self.seconds:,.2f} s, {self.num_steps:,} steps",
            "sequences": f"{self.num_sequences:,}",
            "tokens": f"{self.num_prompt_tokens:,} prompt, {self.num_output_tokens:,} output",
            "throughput": f"{self.output_tokens_per_second:,.1f} output tokens/s, "
            f"{self.total_tokens_per_second:,.1f} with prompts",
            "time to first token": _words(self.time_to_first_token),
            "time per output token": _words(self.time_per_output_token),
            "latency": _words(self.latency),
            "preemptions": f"{self.num_preemptions:,}",
            "prefix cache hits": f"{self.hit_rate:.1%} of prompt tokens",
            "blocks used": f"{self.mean_blocks_used:,.0f} on average, at most {self.peak_blocks_used:,} of "
            f"{self.num_blocks:,}",
            "slots in use": f"{self.occupancy:.1%}",
        }
        if self.num_draft_tokens:
            share = self.num_accepted_tokens / self.num_draft_tokens
            rows["draft tokens"] = (
                f"{self.num_draft_tokens:,} verified, {self.num_accepted_tokens:,} accepted ({share:.0%})"
            )
        for name, words in rows.items():
            table.add_row(name, words)
        return table


def _words(times: Percentiles) -> str:
    scale, unit = (1.0, "s") if times.p50 >= 1 else (1e3, "ms")
    return "   ".join(f"p{q} {getattr(times, f'p{q}') * scale:,.1f} {unit}" for q in QUANTILES)


@dataclass(slots=True)
class RunLog:
    """Accumulates a run of `num_slots` slots, in twelve bytes per sequence."""

    num_slots: int
    num_blocks: int
    num_steps: int = 0
    num_spans: int = 0
    num_output_tokens: int = 0
    seconds_of_blocks: float = 0.0
    seconds_of_steps: float = 0.0
    peak_blocks_used: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    first_token: "array[float]" = field(default_factory=lambda: array("f"))
    per_token: "array[float]" = field(default_factory=lambda: array("f"))
    latency: "array[float]" = field(default_factory=lambda: array("f"))

    @property
    def occupancy(self) -> float:
        """The share of all slots, over all steps so far, in which a sequence ran."""
        return self.num_spans / max(1, self.num_steps * self.num_slots)

    def observe_step(self, num_spans: int, num_blocks_used: int, seconds: float) -> None:
        """Add a step that took `seconds` and left `num_blocks_used` blocks in use."""
        self.num_steps += 1
        self.num_spans += num_spans
        self.seconds_of_steps += seconds
        self.seconds_of_blocks += seconds * num_blocks_used
        self.peak_blocks_used = max(self.peak_blocks_used, num_blocks_used)

    def observe_draft_tokens(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Add verified draft tokens, and the number accepted."""
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted

    def observe_sequence(self, arrival: float, first: float, last: float, num_output_tokens: int) -> None:
        """Add a finished sequence: when it arrived, and when it got its first and its last token."""
        self.num_output_tokens += num_output_tokens
        self.first_token.append(first - arrival)
        self.latency.append(last - arrival)
        if num_output_tokens > 1:
            self.per_token.append((last - first) / (num_output_tokens - 1))

    def add(self, other: "RunLog") -> None:
        """Add the concurrent run of an equal engine."""
        for name in ("num_steps", "num_spans", "num_output_tokens", "seconds_of_blocks", "seconds_of_steps"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.observe_draft_tokens(other.num_draft_tokens, other.num_accepted_tokens)
        self.peak_blocks_used = max(self.peak_blocks_used, other.peak_blocks_used)
        for name in ("first_token", "per_token", "latency"):
            getattr(self, name).extend(getattr(other, name))

    def report(
        self, seconds: float, *, num_preemptions: int, num_prompt_tokens: int, num_cached_tokens: int
    ) -> RunReport:
        """Return the report of the run; the arguments are the scheduler's counters."""
        return RunReport(
            num_sequences=len(self.latency),
            num_steps=self.num_steps,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            seconds=seconds,
            time_to_first_token=Percentiles.from_values(self.first_token),
            time_per_output_token=Percentiles.from_values(self.per_token),
            latency=Percentiles.from_values(self.latency),
            num_preemptions=num_preemptions,
            occupancy=self.occupancy,
            mean_blocks_used=self.seconds_of_blocks / self.seconds_of_steps if self.seconds_of_steps else 0.0,
            peak_blocks_used=self.peak_blocks_used,
            num_blocks=self.num_blocks,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
        )


@dataclass(slots=True)
class SequenceTimes:
    """When a recorded sequence got its first and its last token."""

    first: float
    last: float
    num_output_tokens: int = 0


def sequence_times(recording: Recording) -> dict[tuple[str, int], SequenceTimes]:
    """Return the times of all sequences that got a token, by request and index.

    Every span except a chunk gives a token, and one more for each accepted draft token, at the end of its step.
    """
    times: dict[tuple[str, int], SequenceTimes] = {}
    for step in recording.steps:
        end = step.start_time + step.duration
        for span in step.spans:
            if span.kind != "chunk":
                known = times.setdefault((span.request_id, span.index), SequenceTimes(end, end))
                known.last = end
                known.num_output_tokens += span.num_new_tokens
    return times


def report_of(recording: Recording) -> RunReport:
    """Return a recorded run in numbers. (Without a recorded arrival, a sequence counts from its first token.)

    Raises `ValueError` if no step was recorded.
    """
    config, steps = recording.config, recording.steps
    if not steps:
        raise ValueError("the recording has no steps")
    log, last_step = RunLog(config.scheduling.max_num_seqs, steps[-1].num_blocks), steps[-1]
    for step in steps:
        log.observe_step(len(step.spans), step.num_blocks_used, step.duration)
        log.observe_draft_tokens(sum(s.num_draft_tokens for s in step.spans), sum(s.num_accepted for s in step.spans))
    arrivals = {arrival.request_id: arrival.time for arrival in recording.arrivals}
    for (request_id, _), times in sequence_times(recording).items():
        arrival = arrivals.get(request_id, times.first)
        log.observe_sequence(arrival, times.first, times.last, times.num_output_tokens)
    started = min([*arrivals.values(), steps[0].start_time])
    return log.report(
        last_step.start_time + last_step.duration - started,
        num_preemptions=last_step.num_preemptions,
        num_prompt_tokens=last_step.num_prompt_tokens,
        num_cached_tokens=last_step.num_cached_tokens,
    )
