"""The figures of a run, for records made by hand."""

from array import array
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from inflight.loadtest.report import Distribution, Objectives, load_figure, report_of
from inflight.loadtest.runner import RequestRecord
from inflight.observe.pictures import save_png


def record(
    scheduled: float, sent: float, *token_times: float, failure: str | None = None, count: int = 0
) -> RequestRecord:
    """A request that ended with its last token; if `count` is given, the server counted its tokens."""
    finished = token_times[-1] if token_times else sent + 1
    counts = (count or len(token_times), bool(count))
    return RequestRecord(scheduled, sent, array("d", token_times), finished, 10, *counts, failure)


RECORDS = [
    record(1.0, 1.0, 1.5, 2.0, 3.0, count=5),  # TTFT 0.5, E2E 2, TPOT 1.5 / 4
    record(2.0, 2.5, 3.0, 4.0),  # TTFT 1, E2E 2, TPOT 1
    record(3.0, 3.0, 5.0),  # TTFT 2, E2E 2
    record(3.0, 3.0, failure="HTTP 429: later"),
    record(3.0, 3.5, 4.0, failure="HTTP 429: later"),
    record(3.0, 3.0, failure="cannot connect: refused"),
]
ASKED = [5, 4, 4, 4, 4, 4]


def test_numbers_are_as_defined() -> None:
    report = report_of(RECORDS, ASKED, server_cpu_seconds=2.0, client_cpu_seconds=0.5)
    assert report.seconds == 4.0  # from when the first was due until the last had ended
    assert (report.num_requests, report.num_completed) == (6, 3)
    assert report.failures == {"HTTP 429: later": 2, "cannot connect: refused": 1}
    assert (report.num_input_tokens, report.num_output_tokens, report.num_output_tokens_asked) == (30, 8, 13)
    assert report.num_counted == 1
    assert report.request_rate == 3 / 4.0
    assert report.offered_rate == 5 / 2.0
    assert (report.input_tokens_per_second, report.output_tokens_per_second) == (30 / 4.0, 8 / 4.0)
    assert report.mean_concurrency == (2.0 + 1.5 + 2.0 + 1.0 + 0.5 + 1.0) / 4.0
    assert report.peak_concurrency == 5  # from 3.5 on, all except the first, which ended at 3.0
    assert report.ttft is not None
    assert report.ttft.mean == pytest.approx(3.5 / 3)
    assert (report.ttft.median, report.ttft.max) == (1.0, 2.0)
    assert report.tpot is not None
    assert report.tpot.mean == pytest.approx((0.375 + 1.0) / 2)
    assert report.itl is not None
    assert report.itl.mean == pytest.approx((0.5 + 1.0 + 1.0) / 3)
    assert report.e2e is not None
    assert (report.e2e.mean, report.e2e.max) == (2.0, 2.0)
    assert report.lateness is not None
    assert report.lateness.max == 0.5
    assert (report.server_cpu_seconds, report.client_cpu_seconds) == (2.0, 0.5)
    assert report.goodput is None


def test_quantiles_match_the_values() -> None:
    values = np.random.default_rng(0).exponential(size=1001)
    found = Distribution.from_values(values.tolist())
    ordered = sorted(values.tolist())
    assert found is not None
    assert (found.median, found.p90, found.p95, found.p99) == (ordered[500], ordered[900], ordered[950], ordered[990])
    assert Distribution.from_values([]) is None


@pytest.mark.parametrize(
    ("texts", "num_good"),
    [
        (["ttft:1000"], 2),
        (["ttft:999.9"], 1),
        (["tpot:500"], 2),  # one token has no time per token to be too long
        (["tpot:500,ttft:1999"], 1),
        (["tpot:500", "ttft:2000"], 2),
        (["e2e:2000 ttft:5000"], 3),
        (["e2e:1999"], 0),
    ],
)
def test_goodput_counts_requests_that_met_every_objective(texts: list[str], num_good: int) -> None:
    report = report_of(RECORDS, ASKED, objectives=Objectives.parse(texts))
    assert report.num_good == num_good
    assert report.goodput == num_good / 4.0


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:-1", "latency:5", "ttft:5:6", "ttft=5", "ttft:nan"])
def test_an_invalid_objective_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as ttft:500"):
        Objectives.parse([text])


def test_the_tables_show_failures_and_missing_counts() -> None:
    out = StringIO()
    Console(file=out, width=100, markup=False).print(report_of(RECORDS, ASKED, objectives=Objectives(e2e=2.0)).tables())
    text = out.getvalue()
    assert "3 of 6 completed" in text
    assert "chunks, of 2 that the server did not count" in text
    assert "failed (2)" in text
    assert "50.0% of all met the objectives" in text
    assert [line.split()[1:4] for line in text.splitlines() if line.startswith("E2E")] == [
        ["2,000.0", "2,000.0", "2,000.0"]
    ]


@pytest.mark.parametrize("records", [RECORDS, RECORDS[3:4], RECORDS[:1]], ids=["all", "only failed", "one"])
@pytest.mark.thorough("one")
def test_every_run_can_be_drawn(records: list[RequestRecord], tmp_path: Path) -> None:
    figure = load_figure(records, "a run")
    assert [panel.get_title(loc="left") for panel in figure.axes] == [
        "requests",
        "output tokens/s",
        "latencies",
        "distributions",
    ]
    path = tmp_path / "run.png"
    save_png(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert report_of(records, ASKED[: len(records)]).tables() is not None
