"""The race and the bench: all methods give the same tokens, and figures follow from what ran."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import GPT2Config, GPT2LMHeadModel

from inflight.contracts.api.config import EngineConfig
from inflight.lessons import race, static_bench
from inflight.lessons.methods import Setting
from inflight.lessons.run import LessonRequest, Run
from inflight.lessons.scores import Scores
from tests import zoo


@pytest.fixture(scope="module")
def result() -> race.Race:
    setting = Setting(zoo.build("gpt2"), EngineConfig(max_num_seqs=4))
    requests = race.mixed_requests(10, 24, zoo.VOCAB_SIZE, seed=0)
    return race.run_race(setting.methods, requests, 4, Console(file=StringIO()))


def test_all_methods_give_every_request_the_same_tokens(result: race.Race) -> None:
    assert list(result.runs) == ["static", "padded", "ragged", "engine"]
    assert set(result.differing.values()) == {0}
    for run in result.runs.values():
        assert [len(tokens) for tokens in run.token_ids] == [request.max_new_tokens for request in run.requests]


def test_a_method_that_gives_other_tokens_is_detected(result: race.Race) -> None:
    broken = Run(result.runs["static"].requests)
    for answer, right in zip(broken.answers, result.runs["static"].answers, strict=True):
        answer.token_ids, answer.finished_time = [*right.token_ids], right.finished_time
    broken.answers[3].token_ids[-1] += 1
    assert race.Race({**result.runs, "engine": broken}, 4).differing["engine"] == 1


def test_scores_are_computed_from_the_log(result: race.Race) -> None:
    scores = result.scores
    assert scores["static"].num_steps > scores["padded"].num_steps >= scores["ragged"].num_steps
    assert scores["ragged"].num_steps == scores["engine"].num_steps
    assert scores["static"].token_padding > 0.3
    assert scores["padded"].key_padding > 0
    assert scores["ragged"].token_padding == scores["engine"].key_padding == 0
    for each in scores.values():
        assert 0 < each.first_token_p50 <= each.latency_p50 <= each.latency_p95 <= each.seconds
        assert 0 < each.occupancy <= 1


def test_padding_is_the_unused_part_of_a_row() -> None:
    run = Run([LessonRequest([1] * 10, 2), LessonRequest([2] * 4, 1)])
    run.rectangle({0: 0, 1: 1}, width=10, num_keys=10)
    run.add(0, 7)
    run.add(1, 7)
    run.rectangle({0: 0, 1: 1}, width=1, num_keys=11)
    run.add(0, 7)
    uses = [{slot: (lane.use, lane.num_padding, lane.num_padding_keys) for slot, lane in s.items()} for s in run.steps]
    assert uses == [
        {0: ("prefill", 0, 0), 1: ("prefill", 6, 6)},
        {0: ("decode", 0, 0), 1: ("padding", 1, 11)},
    ]
    scores = Scores.from_run(run, num_slots=2)
    assert scores.token_padding == 7 / 22
    assert scores.key_padding == 17 / 42
    assert scores.occupancy == 3 / 4


def test_the_picture_and_the_page_show_every_method(result: race.Race, tmp_path: Path) -> None:
    race.write_png(result, tmp_path / "race.png")
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")
    race.write_html(result, tmp_path / "race.html")
    page = (tmp_path / "race.html").read_text()
    assert "<svg" in page
    assert "http" not in page
    assert all(name in page for name in result.runs)


def test_the_terminal_shows_idle_slots_and_padding_within_its_width(result: race.Race) -> None:
    console = Console(file=StringIO(), width=60)
    console.print(result)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "░" in text.split("padded:")[0]
    assert "All methods gave the same tokens." in text


@pytest.mark.thorough
def test_the_bench_counts_steps_which_do_not_depend_on_the_machine() -> None:
    config = GPT2Config(vocab_size=128, n_positions=640, n_embd=16, n_layer=1, n_head=2)
    model, lines = GPT2LMHeadModel(config).eval(), list[str]()
    measured = static_bench.measure(static_bench.compare_rungs(model, 32), 2, lines.append)
    assert {name: each.num_steps for name, each in measured.items()} == {
        "static": 400,
        "padded": 132,
        "ragged": 130,
        "engine": 130,
        "model.generate": 400,
    }
    assert {each.num_differing for each in measured.values()} == {0}
    assert [len(each.seconds) for each in measured.values()] == [2] * 5
    comparison = static_bench.compare_shared_prefix(model, 32)
    shared = static_bench.measure(comparison, 2, lines.append)
    assert list(shared) == ["static", "shared prefix", "engine, cold", "engine, warm", "engine, disk"]
    assert {each.num_differing for each in shared.values()} == {0}
    assert len(lines) == 2 * 5 + 2 * 5
    storing: Any = comparison.prepare["engine, disk"]
    assert storing.__self__.engine.scheduler.persistence.num_restored_tokens == 2 * static_bench.NUM_PREFIX_TOKENS
