"""Which requests are sent and when, from distributions, seeds, files and traces."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.workloads import WORKLOADS as PUBLISHED
from inflight.loadtest.files import read_prompts, read_trace
from inflight.loadtest.load_test import arrival_times
from inflight.loadtest.workloads import WORKLOADS, Sketch, random_sketches, repeated, write_prompts
from inflight.simulate import Lengths

FIVE = Lengths("fixed", 5)

# ------------------------------------------------------------------------------------------------------ arrivals


def test_arrivals_start_at_once_and_keep_the_rate() -> None:
    times = arrival_times(20_001, 8.0, seed=3)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20_000 / 8.0, rel=0.03)
    assert times == arrival_times(20_001, 8.0, seed=3)
    assert times != arrival_times(20_001, 8.0, seed=4)
    assert arrival_times(3, float("inf")) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    gaps = np.diff(arrival_times(20_001, 1.0, burstiness=burstiness))
    # The coefficient of variation of a gamma distribution is one over the square root of its shape.
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_requests_of_a_burst_arrive_together_and_the_overall_rate_is_kept() -> None:
    times = arrival_times(30_000, 8.0, burst_size=10)
    assert len(set(times)) == 3000
    assert [times.count(time) for time in times[:20:10]] == [10, 10]
    assert times[-1] == pytest.approx(30_000 / 8.0, rel=0.1)


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"rate": float("nan")}, {"rate": 1.0, "burstiness": 0.0}])
def test_invalid_rates_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        arrival_times(3, **options)


# ------------------------------------------------------------------------------------------------------ prompts


def test_lengths_depend_only_on_the_seed() -> None:
    sketches = random_sketches(200, Lengths("uniform", 16, 64), Lengths("exponential", 20), seed=1)
    assert sketches == random_sketches(200, Lengths("uniform", 16, 64), Lengths("exponential", 20), seed=1)
    assert sketches != random_sketches(200, Lengths("uniform", 16, 64), Lengths("exponential", 20), seed=2)
    assert {sketch.prompt for sketch in sketches} <= set(range(16, 65))
    for vocab_size in (1000, None):
        prompts: Any = write_prompts(sketches, vocab_size=vocab_size)
        lengths = [len(prompt.split() if isinstance(prompt, str) else prompt) for prompt in prompts]
        assert lengths == [sketch.prompt for sketch in sketches]


@pytest.mark.parametrize("vocab_size", [1000, None])
def test_prompts_are_reproducible_and_share_only_the_prefix(vocab_size: int | None) -> None:
    def prompts(seed: int) -> list[Any]:
        written = write_prompts([Sketch(20, 1)] * 30, num_prefix_tokens=50, vocab_size=vocab_size, seed=seed)
        return [prompt.split() if isinstance(prompt, str) else prompt for prompt in written]

    first = prompts(0)
    assert first == prompts(0)
    assert {tuple(prompt[:50]) for prompt in first} == {tuple(first[0][:50])}
    assert len({tuple(prompt[50:53]) for prompt in first}) == 30
    assert {tuple(prompt[:20]) for prompt in first}.isdisjoint(tuple(prompt[:20]) for prompt in prompts(1))


@pytest.mark.parametrize("vocab_size", [1000, None])
def test_each_prompt_has_one_of_several_prefixes(vocab_size: int | None) -> None:
    options: dict[str, Any] = {"num_prefix_tokens": 50, "num_prefixes": 4, "vocab_size": vocab_size}
    written: list[Any] = write_prompts([Sketch(20, 1)] * 200, **options)
    prompts = [prompt.split() if isinstance(prompt, str) else prompt for prompt in written]
    used = Counter(tuple(prompt[:50]) for prompt in prompts)
    assert len(used) == 4
    assert min(used.values()) > 20
    assert {len(prompt) for prompt in prompts} == {70}
    assert len({tuple(prompt[50:]) for prompt in prompts}) == 200


def test_token_ids_are_in_the_vocabulary_and_given_prompts_are_unchanged() -> None:
    prompts = write_prompts([Sketch(500, 1), Sketch("as it is", 1), Sketch([1, 2], 1)], vocab_size=310)
    assert isinstance(prompts[0], list)
    assert set(prompts[0]) == set(range(300, 310))
    assert prompts[1:] == ["as it is", [1, 2]]
    assert write_prompts([Sketch(50, 1)], vocab_size=5)[0] == [4] * 50


def test_the_named_workloads_are_the_published_ones() -> None:
    for name, published in {"W1": "W1", "W2": "W2-32", "W3": "W3"}.items():
        workload = WORKLOADS[name]
        lengths = [(prompt + workload.num_prefix_tokens, output) for prompt, output in workload.lengths]
        assert lengths == PUBLISHED[published].lengths
        assert workload.num_prefix_tokens == PUBLISHED[published].num_prefix_tokens
        assert [(sketch.prompt, sketch.num_output_tokens) for sketch in workload.sketches] == workload.lengths


def test_a_list_is_repeated_if_more_requests_are_needed() -> None:
    sketches = [Sketch(n, 1) for n in (1, 2, 3)]
    assert [sketch.prompt for sketch in repeated(sketches, 7)] == [1, 2, 3, 1, 2, 3, 1]
    assert repeated(sketches, 2) == sketches[:2]
    assert repeated(sketches, None) == sketches


# ------------------------------------------------------------------------------------------------------ files


def written(folder: Path, *entries: Any) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n")
    return path


def test_a_prompt_file_may_have_entries_of_every_kind(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    conversation = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "hello"},
        {"from": "gpt", "value": "x" * 41},
    ]
    path = written(
        tmp_path,
        "a text",
        [7, 8],
        {"prompt": "b", "output_tokens": 9},
        {"prompt": [1], "max_tokens": 3, "custom_id": "x"},
        {"messages": messages},
        {"conversations": conversation},
        {"conversations": [{"from": "human", "value": "hm"}]},
    )
    assert read_prompts(path, FIVE, 0) == [
        Sketch("a text", 5),
        Sketch([7, 8], 5),
        Sketch("b", 9),
        Sketch([1], 3),
        Sketch(messages, 5),
        Sketch("hello", 10),
        Sketch("hm", 5),
    ]


def test_a_prompt_file_may_be_one_list_like_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "good day to you"}]
    path.write_text(json.dumps([{"id": "1", "conversations": turns}, "text"], indent=2))
    assert read_prompts(path, FIVE, 0) == [Sketch("hello", 3), Sketch("text", 5)]


def test_lengths_missing_from_a_file_are_drawn(tmp_path: Path) -> None:
    path = written(tmp_path, *["text"] * 50)
    lengths = [sketch.num_output_tokens for sketch in read_prompts(path, Lengths("uniform", 1, 1000), 0)]
    assert len(set(lengths)) > 30
    assert lengths == [sketch.num_output_tokens for sketch in read_prompts(path, Lengths("uniform", 1, 1000), 0)]


def test_a_trace_is_sorted_by_time_and_starts_at_0(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"timestamp": 12.5, "prompt_tokens": 30, "output_tokens": 4},
        {"timestamp": 10, "prompt": "text"},
        {"timestamp": 12.5, "prompt": [1, 2], "output_tokens": 6},
    )
    assert read_trace(path, FIVE, 0) == [Sketch("text", 5, 0.0), Sketch(30, 4, 2.5), Sketch([1, 2], 6, 2.5)]


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"text": "a"}, "it must be JSON: a text, a list of token ids, or an object with"),
        ({"prompt": ""}, "it must be JSON"),
        ({"prompt": [-1]}, "it must be JSON"),
        (17, "it must be JSON"),
        ({"prompt": "a", "output_tokens": 0}, "output tokens is 0; it must be an integer of at least 1"),
        ({"conversations": []}, '"conversations" must be a list of objects'),
    ],
)
def test_a_bad_prompt_is_refused_with_its_line(tmp_path: Path, entry: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=r"line 2 of .*requests\.jsonl: ") as caught:
        read_prompts(written(tmp_path, "good", entry), FIVE, 0)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("entry", [{"prompt_tokens": 3}, {"timestamp": "1", "prompt": "a"}, {"timestamp": 1}, "a"])
def test_a_bad_line_of_a_trace_is_refused(tmp_path: Path, entry: Any) -> None:
    with pytest.raises(ValueError, match=r"line 1 of .*: a trace needs"):
        read_trace(written(tmp_path, entry), FIVE, 0)


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_prompts(tmp_path / "missing", FIVE, 0)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="has no requests in it"):
        read_prompts(tmp_path / "empty", FIVE, 0)
    (tmp_path / "text").write_text("not JSON")
    with pytest.raises(ValueError, match="line 1 of"):
        read_prompts(tmp_path / "text", FIVE, 0)
