"""`LoadReport`: a run against a server in numbers, computed from the records of its requests.

Times are in seconds. Failed requests count only as failures.

- TTFT, time to first token: from when a request was *due* to its first chunk with text.
- E2E, latency: from when the request was due to the last chunk of its answer.
- TPOT, time per output token: (E2E - TTFT) / (output tokens - 1), one number per request.
- ITL, inter-token latency: between a request's chunks that carry tokens, all gaps of all requests.
- Goodput: requests per second that met all objectives (DistServe, Zhong et al., 2024).

Draws a run: requests over time, tokens over time, latencies over time, and their distributions. Needs the extra
`pictures`.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group
from rich.table import Column, Table

from inflight.loadtest.runner import RequestRecord
from inflight.observe.pictures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = {"TTFT": "#2f6f8f", "TPOT": "#7d5ba6", "ITL": "#8fbf6f", "E2E": "#e8a33d", "failed": "#c0392b"}
NUM_BINS = 60
"""Bins of the token rate over time."""

SHORTEST = 1e-5
"""Seconds. Shorter times are drawn here, because a logarithmic scale has no 0."""


def load_figure(records: Sequence[RequestRecord], title: str) -> "Figure":
    """Return a figure with four panels. Raises `ValueError` without the extra."""
    figure = new_figure(11.0, 7.0)
    panels = figure.subplots(2, 2)
    figure.suptitle(title, fontsize=10)
    _draw_requests(panels[0, 0], records)
    _draw_token_rate(panels[0, 1], records)
    _draw_latencies(panels[1, 0], records)
    _draw_distributions(panels[1, 1], records)
    for panel in panels.flat:
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_requests(panel: "Axes", records: Sequence[RequestRecord]) -> None:
    """Draw how many requests were due, sent and ended; between the curves are those held back or in flight."""
    for name, colour, width, moments in (
        ("due", "#cccccc", 3, [record.scheduled for record in records]),
        ("sent", COLOURS["TTFT"], 1, [record.sent for record in records]),
        ("ended", COLOURS["E2E"], 1, [record.finished for record in records]),
    ):
        counts = range(len(moments) + 1)
        panel.step([0.0, *sorted(moments)], counts, where="post", color=colour, label=name, linewidth=width)
    _label(panel, "requests", "seconds", "requests so far")


def _draw_token_rate(panel: "Axes", records: Sequence[RequestRecord]) -> None:
    """Draw output tokens per second; a request's tokens are distributed evenly over its chunks."""
    moments = np.concatenate([np.zeros(0), *(np.frombuffer(each.token_times) for each in records if each.token_times)])
    weights = [each.num_output_tokens / len(each.token_times) for each in records for _ in each.token_times]
    end = max(record.finished for record in records) or 1.0
    tokens, edges = np.histogram(moments, NUM_BINS, (0.0, end), weights=weights)
    panel.stairs(tokens / np.diff(edges), edges, fill=True, color="#2f8f5b", alpha=0.7)
    panel.set_title("output tokens/s", loc="left", fontsize=9)
    panel.set_xlabel("seconds", fontsize=8)


def _draw_latencies(panel: "Axes", records: Sequence[RequestRecord]) -> None:
    done = [record for record in records if record.failure is None]
    failed = [record for record in records if record.failure is not None]
    due = [record.scheduled for record in done]
    panel.scatter(due, [each.time_to_first_token for each in done], s=6, color=COLOURS["TTFT"], label="TTFT")
    panel.scatter(due, [each.latency for each in done], s=6, color=COLOURS["E2E"], label="E2E")
    if failed:
        moments, latencies = [each.scheduled for each in failed], [each.latency for each in failed]
        panel.scatter(moments, latencies, s=14, marker="x", color=COLOURS["failed"], label="failed")
    _label(panel, "latencies", "due at (seconds)", "seconds")


def _draw_distributions(panel: "Axes", records: Sequence[RequestRecord]) -> None:
    done = [record for record in records if record.failure is None]
    for name, times in {
        "TTFT": [record.time_to_first_token for record in done],
        "TPOT": [tpot for record in done if (tpot := record.time_per_output_token) is not None],
        "ITL": [gap for record in done for gap in record.inter_token_latencies],
        "E2E": [record.latency for record in done],
    }.items():
        if times:
            panel.ecdf(np.maximum(times, SHORTEST) * 1000, color=COLOURS[name], label=name, linewidth=1)
    panel.set_xscale("log")
    _label(panel, "distributions", "milliseconds", "share of values up to this")


def _label(panel: "Axes", title: str, x: str, y: str) -> None:
    panel.set_title(title, loc="left", fontsize=9)
    panel.set_xlabel(x, fontsize=8)
    panel.set_ylabel(y, fontsize=8)
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=7, frameon=False)


QUANTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of times in seconds; quantiles are interpolated between the two nearest values."""

    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def from_values(cls, values: Iterable[float]) -> "Distribution | None":
        """Return the distribution of `values`; None if there are no values."""
        array = np.fromiter(values, dtype=np.float64)
        if not array.size:
            return None
        median, p90, p95, p99 = np.percentile(array, QUANTILES).tolist()
        return cls(float(array.mean()), median, p90, p95, p99, float(array.max()))


@dataclass(frozen=True, slots=True)
class Objectives:
    """The limits that a good request keeps (an SLO), in seconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, texts: Iterable[str]) -> "Objectives":
        """Parse texts such as "ttft:500" or "ttft:500,tpot:50", in milliseconds. Raises `ValueError`."""
        limits = {}
        for part in re.split(r"[,\s]+", " ".join(texts).strip()):
            name, _, number = part.partition(":")
            names = [field.name for field in fields(cls)]
            if name not in names or not re.fullmatch(r"\d+(\.\d+)?", number):
                raise ValueError(
                    f"the objective is {part!r}; it must be one of {', '.join(names)}, a colon and milliseconds, such "
                    "as ttft:500"
                )
            limits[name] = float(number) / 1000
        return cls(**limits)

    def are_met_by(self, record: RequestRecord) -> bool:
        """Whether a request was completed within all limits; a request without a TPOT meets any limit on it."""
        if record.failure is not None:
            return False
        found = (record.time_to_first_token, record.time_per_output_token, record.latency)
        return all(
            limit is None or value is None or value <= limit
            for limit, value in zip((self.ttft, self.tpot, self.e2e), found, strict=True)
        )


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A run in numbers; times are in seconds.

    Attributes:
        seconds: from the first request's due time to the end of the last request.
        num_requests, num_completed: all requests, and the completed ones.
        failures: the number of failures by reason.
        num_input_tokens, num_output_tokens: tokens of completed requests. Where the server does not count, input tokens
            are the token ids sent, and output tokens are the chunks received.
        num_output_tokens_asked: output tokens that the completed requests asked for.
        num_counted: completed requests whose tokens the server counted.
        request_rate: completed requests per second.
        offered_rate: due requests per second; None: all at once.
        input_tokens_per_second, output_tokens_per_second: for completed requests, over the whole run.
        mean_concurrency, peak_concurrency: requests in flight, as the client saw it.
        ttft, tpot, itl, e2e: see above; None: there were no values.
        lateness: from when requests were due until they were sent: how long `max_concurrency` held them back or,
            without it, how busy the client was.
        goodput: good requests per second; None: no objectives were given.
        num_good: the number of good requests.
        server_cpu_seconds: CPU time of the server's processes during the run; None: not measured.
        client_cpu_seconds: CPU time of the processes that sent the requests.
    """

    seconds: float
    num_requests: int
    num_completed: int
    failures: dict[str, int]
    num_input_tokens: int
    num_output_tokens: int
    num_output_tokens_asked: int
    num_counted: int
    request_rate: float
    offered_rate: float | None
    input_tokens_per_second: float
    output_tokens_per_second: float
    mean_concurrency: float
    peak_concurrency: int
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    lateness: Distribution | None
    goodput: float | None
    num_good: int | None
    server_cpu_seconds: float | None
    client_cpu_seconds: float

    def tables(self) -> Group:
        """Return the report as tables for a terminal."""
        table = Table.grid(Column(style="dim"), "", padding=(0, 2))
        for name, words in _rows(self).items():
            table.add_row(name, words)
        return Group(table, "", _times_table(self))


def report_of(
    records: Sequence[RequestRecord],
    num_output_tokens_asked: Sequence[int],
    *,
    objectives: Objectives | None = None,
    server_cpu_seconds: float | None = None,
    client_cpu_seconds: float = 0.0,
) -> LoadReport:
    """Return a run in numbers.

    Args:
        records: the records of all requests.
        num_output_tokens_asked: how many output tokens each request asked for.
    """
    done = [record for record in records if record.failure is None]
    start = min(record.scheduled for record in records)
    last_due = max(record.scheduled for record in records)
    seconds = max(record.finished for record in records) - start
    per_second = 1 / seconds if seconds > 0 else 0.0
    inputs, outputs = sum(each.num_prompt_tokens or 0 for each in done), sum(each.num_output_tokens for each in done)
    asked = sum(count for record, count in zip(records, num_output_tokens_asked, strict=True) if record.failure is None)
    num_good = None if objectives is None else sum(map(objectives.are_met_by, records))
    return LoadReport(
        seconds=seconds,
        num_requests=len(records),
        num_completed=len(done),
        failures=dict(Counter(record.failure for record in records if record.failure is not None).most_common()),
        num_input_tokens=inputs,
        num_output_tokens=outputs,
        num_output_tokens_asked=asked,
        num_counted=sum(record.is_counted for record in done),
        request_rate=len(done) * per_second,
        offered_rate=(len(records) - 1) / (last_due - start) if last_due > start else None,
        input_tokens_per_second=inputs * per_second,
        output_tokens_per_second=outputs * per_second,
        mean_concurrency=sum(record.finished - record.sent for record in records) * per_second,
        peak_concurrency=_peak(records),
        ttft=Distribution.from_values(record.time_to_first_token for record in done),
        tpot=Distribution.from_values(tpot for record in done if (tpot := record.time_per_output_token) is not None),
        itl=Distribution.from_values(gap for record in done for gap in record.inter_token_latencies),
        e2e=Distribution.from_values(record.latency for record in done),
        lateness=Distribution.from_values(record.sent - record.scheduled for record in records),
        goodput=None if num_good is None else num_good * per_second,
        num_good=num_good,
        server_cpu_seconds=server_cpu_seconds,
        client_cpu_seconds=client_cpu_seconds,
    )


def _peak(records: Sequence[RequestRecord]) -> int:
    """Return the most requests in flight at once; a request that ends when another is sent does not overlap it."""
    changes = [(record.sent, 1) for record in records] + [(record.finished, -1) for record in records]
    return max(accumulate(change for _, change in sorted(changes)))


def _rows(report: LoadReport) -> dict[str, str]:
    offered = "all at once" if report.offered_rate is None else f"{report.offered_rate:,.2f}/s offered"
    counted = "" if report.num_counted == report.num_completed else (
        f" (chunks, of {report.num_completed - report.num_counted:,} that the server did not count)"
    )  # fmt: skip
    rows = {
        "wall time": f"{report.seconds:,.2f} s",
        "requests": f"{report.num_completed:,} of {report.num_requests:,} completed, {offered}",
        "in flight": f"{report.mean_concurrency:,.1f} on average, at most {report.peak_concurrency:,}",
        "tokens": f"{report.num_input_tokens:,} input, {report.num_output_tokens:,} output of "
        f"{report.num_output_tokens_asked:,} requested{counted}",
        "throughput": f"{report.request_rate:,.2f} requests/s, {report.input_tokens_per_second:,.1f} input and "
        f"{report.output_tokens_per_second:,.1f} output tokens/s",
    }
    if report.goodput is not None and report.num_good is not None:
        share = report.num_good / report.num_requests
        rows["goodput"] = f"{report.goodput:,.2f} requests/s ({share:.1%} of all met the objectives)"
    if report.server_cpu_seconds is not None:
        rows["server's CPU time"] = _cpu(report.server_cpu_seconds, report.seconds)
    rows["client's CPU time"] = _cpu(report.client_cpu_seconds, report.seconds)
    rows |= {f"failed ({count:,})": reason for reason, count in report.failures.items()}
    return rows


def _cpu(cpu_seconds: float, seconds: float) -> str:
    return f"{cpu_seconds:,.2f} s, {cpu_seconds / seconds if seconds else 0.0:.2f} cores"


def _times_table(report: LoadReport) -> Table:
    columns = [field.name for field in fields(Distribution)]
    numbers = (Column(justify="right", no_wrap=True) for _ in columns)
    table = Table.grid(Column(style="dim", no_wrap=True), *numbers, padding=(0, 2))
    table.add_row("milliseconds", *columns, style="dim")
    measured = {"TTFT": report.ttft, "TPOT": report.tpot, "ITL": report.itl, "E2E": report.e2e}
    for name, times in {**measured, "sent late": report.lateness}.items():
        if times is not None:
            table.add_row(name, *(f"{getattr(times, column) * 1000:,.1f}" for column in columns))
    return table
