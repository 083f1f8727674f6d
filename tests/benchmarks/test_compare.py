"""Rounds are interleaved, failed peers are left out, and the report has every figure."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import compare
from benchmarks.peers import catalogue, report
from benchmarks.peers.protocol import Loaded, Measured, RequestMeasured
from benchmarks.peers.results import CellResult, Comparison, PeerRuns, percentile
from benchmarks.workloads import WORKLOADS

LOADED = Loaded({"python": "3.11"}, {"threads": 2}, 0.5, 1.0, 100 << 20, 200 << 20)


def run(seconds: float, num_tokens: int = 10, num_requests: int = 2) -> Measured:
    requests = [RequestMeasured(num_tokens, seconds / 4, seconds)] * num_requests
    return Measured(seconds, requests, 300 << 20)


def cell() -> CellResult:
    runs = [
        PeerRuns("inflight", LOADED, [run(1.0), run(2.0), run(1.0)]),
        PeerRuns("hf-static", LOADED, [run(4.0), run(4.0), run(3.0)]),
    ]
    return CellResult("W1", "a few", 14, 20, 8, runs, {"openvino": "it is not installed"})


def test_figures_are_computed_from_the_rounds() -> None:
    ours, theirs = cell().runs
    assert ours.tokens_per_second.median == 20
    assert (ours.tokens_per_second.lowest, ours.tokens_per_second.highest) == (10, 20)
    ratio = cell().ratio(theirs)
    assert ratio is not None
    assert (ratio.lowest, ratio.median, ratio.highest) == (2, 3, 4)
    assert cell().ratio(ours) is None
    assert ours.peak_memory == 300
    assert theirs.first_token_seconds(0.5) == 1.0
    assert percentile([3.0, 1.0, 2.0], 0.75) == 2.5
    assert percentile([1.0], 0.95) == 1.0


def test_the_report_has_every_figure(tmp_path: Path) -> None:
    setting = {"rounds": "3", "threads": "2"}
    comparison = Comparison("gpt2", "float32", None, setting, {"processor": "a fast one"}, [cell()])
    written = report.write_report(comparison, tmp_path)
    assert [path.name for path in written] == [f"peers-gpt2-float32.{ending}" for ending in ("md", "json", "png")]
    text = written[0].read_text()
    assert "| inflight | 20.0 | 10.0 | 20.0 |" in text
    assert "| transformers, static waves | 5.0 | 5.0 | 6.7 | 3.00 | 2.00 | 4.00 | 300 |" in text
    assert "Left out: OpenVINO GenAI: it is not installed" in text
    summary = json.loads(written[1].read_text())["cells"][0]["runs"][1]["summary"]
    assert summary["inflight_ratio"]["median"] == 3
    assert written[2].stat().st_size > 1000
    console = Console(record=True, width=80)
    console.print(report.rich_table(cell()))
    shown = console.export_text()
    assert "3.00" in shown
    assert "…" not in shown


def test_a_peer_that_fails_is_left_out_of_its_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "LOGS", tmp_path)
    fake = [
        compare.Contestant(catalogue.Peer(name, name, "tests.benchmarks.fake_peer"), Path(model))
        for name, model in [("inflight", "fine"), ("hf-static", "stops early"), ("hf-continuous", "fine")]
    ]
    console = Console(record=True, width=160)
    plan = compare.Plan("gpt2", "float32", None, rounds=3, threads=1, max_batch_tokens=512)
    found = compare.run_cell(WORKLOADS["W1"], fake, {"vllm": "it is not installed"}, plan, console)
    assert [runs.peer for runs in found.runs] == ["inflight", "hf-continuous"]
    assert [len(runs.rounds) for runs in found.runs] == [3, 3]
    assert set(found.left_out) == {"vllm", "hf-static"}
    said = [line.split(": ")[1].split(" ")[0] for line in console.export_text().splitlines() if "tokens/s" in line]
    assert said == ["inflight", "transformers,", "transformers,", "inflight", "inflight", "transformers,"]


def test_which_peers_take_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(catalogue, "ENVIRONMENTS", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    plan = compare.Plan(str(tmp_path), "bfloat16", "int8", rounds=1, threads=1, max_batch_tokens=512)
    contestants, left_out = compare.enter(["inflight", "hf-static", "openvino"], plan, Console(quiet=True))
    assert [(each.peer.name, each.model, each.command[0]) for each in contestants] == [
        ("inflight", tmp_path, sys.executable)
    ]
    assert left_out["hf-static"] == "it does not run in bfloat16 int8 on a CPU"
    assert "--install openvino" in left_out["openvino"]
