"""Draws a run: requests over time, tokens over time, latencies over time, and their distributions. Needs the extra
`pictures`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

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
