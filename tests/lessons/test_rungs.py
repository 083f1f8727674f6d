"""The rungs: each gives the plain model's tokens, and uses the slots as its name says."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from inflight.contracts.api.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.lessons import engine_batching, padded_batching, ragged_batching, shared_prefix, static_batching
from inflight.lessons.run import LessonRequest, Run
from tests import zoo

NUM_SLOTS = 3


def requests_of(seed: int, count: int = 8) -> list[LessonRequest]:
    rng = random.Random(seed)
    return [
        LessonRequest([rng.randrange(1, zoo.VOCAB_SIZE) for _ in range(rng.randint(1, 20))], rng.randint(1, 15))
        for _ in range(count)
    ]


def on_engine(model: object, requests: Sequence[LessonRequest], num_slots: int, **options: Any) -> Run:
    engine = Engine(model, EngineConfig(max_num_seqs=num_slots, speculation="off"))  # type: ignore[arg-type]
    return engine_batching.run(engine, requests, **options)


RUNGS: dict[str, Callable[..., Run]] = {
    "static": static_batching.run,
    "padded": padded_batching.run,
    "ragged": ragged_batching.run,
    "engine": on_engine,
}


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "qwen3"])
@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_gives_the_tokens_of_the_plain_model(rung: str, name: str) -> None:
    model, requests = zoo.build(name), requests_of(seed=1)
    expected = [zoo.plain_greedy(model, list(each.prompt_token_ids), each.max_new_tokens) for each in requests]
    assert RUNGS[rung](model, requests, NUM_SLOTS).token_ids == expected


@pytest.mark.parametrize("rung", RUNGS)
def test_no_request_runs_before_it_has_arrived(rung: str) -> None:
    model, arrivals = zoo.build("llama"), (0, 2, 2, 3, 60, 61)
    requests = [
        LessonRequest(each.prompt_token_ids, each.max_new_tokens, arrival)
        for each, arrival in zip(requests_of(seed=4), arrivals, strict=False)
    ]
    run = RUNGS[rung](model, requests, NUM_SLOTS)
    expected = [zoo.plain_greedy(model, list(each.prompt_token_ids), each.max_new_tokens) for each in requests]
    assert run.token_ids == expected
    began = {lane.request: number for number, step in reversed([*enumerate(run.steps)]) for lane in step.values()}
    assert all(began[number] >= arrival for number, arrival in enumerate(arrivals))
    assert began[4] == 60, "it ran alone"
    assert not run.steps[59]


def test_the_ragged_lesson_refuses_windows_that_its_mask_does_not_support() -> None:
    with pytest.raises(ValueError, match="MistralForCausalLM has sliding windows"):
        ragged_batching.run(zoo.build("mistral"), requests_of(seed=1), NUM_SLOTS)


@pytest.mark.parametrize("rung", RUNGS)
def test_an_eos_token_ends_an_answer_early(rung: str) -> None:
    model, requests = zoo.build("llama"), [LessonRequest([1, 2, 3], 20), LessonRequest([4, 5], 20)]
    plain = [zoo.plain_greedy(model, list(each.prompt_token_ids), 20) for each in requests]
    eos = plain[0][4]
    expected = [tokens[: tokens.index(eos) + 1] if eos in tokens else tokens for tokens in plain]
    assert RUNGS[rung](model, requests, 2, eos_token_ids=[eos]).token_ids == expected


def test_only_static_waves_wait_for_their_longest_sequence() -> None:
    model = zoo.build("llama")
    requests = [LessonRequest([1, 2, 3], 30 if number % 4 == 0 else 3) for number in range(8)]
    num_steps = {name: len(rung(model, requests, 4).steps) for name, rung in RUNGS.items()}
    assert num_steps["static"] == 60
    assert num_steps["ragged"] == num_steps["engine"] < 40
    assert num_steps["padded"] < 45


def test_only_rectangles_compute_padding() -> None:
    model, requests = zoo.build("llama"), requests_of(seed=2)
    uses = {
        name: {lane.use for step in rung(model, requests, NUM_SLOTS).steps for lane in step.values()}
        for name, rung in RUNGS.items()
    }
    assert "padding" in uses["static"]
    assert all("padding" not in uses[name] for name in ("padded", "ragged", "engine"))


@pytest.mark.parametrize("rung", RUNGS)
def test_the_log_shows_which_request_holds_which_slot(rung: str) -> None:
    lines: list[str] = []
    RUNGS[rung](zoo.build("llama"), requests_of(seed=3), NUM_SLOTS, log=lines.append)
    admissions = [line for line in lines if "<- req" in line]
    assert admissions[0].startswith("slot 0 <- req 0 (")
    assert len(admissions) == 8


def test_filtering_drops_columns_that_no_row_needs() -> None:
    requests = [LessonRequest([1] * 20, 2), LessonRequest([2] * 5, 9)]
    account = Run(requests)
    batch = padded_batching.init_batch(zoo.build("llama"), account, [0, 1], [0, 1])
    padded_batching.generate_next_token(zoo.build("llama"), batch, account)
    padded_batching.generate_next_token(zoo.build("llama"), batch, account)
    assert batch.attention_mask.shape == (2, 22)
    left, removed = padded_batching.filter_batch(batch, account)
    assert removed == [0]
    assert left is not None
    assert left.attention_mask.tolist() == [[1] * 7]
    assert left.cache.get_seq_length() == 6


def sharing_requests(num_shared: int = 35) -> list[LessonRequest]:
    rng = random.Random(7)
    prefixes = [[rng.randrange(1, zoo.VOCAB_SIZE) for _ in range(num_shared)] for _ in range(2)]
    suffixes = [[rng.randrange(1, zoo.VOCAB_SIZE) for _ in range(rng.randint(1, 9))] for _ in range(6)]
    return [LessonRequest(prefixes[i % 2] + suffix, rng.randint(1, 12)) for i, suffix in enumerate(suffixes)]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_shared_prefixes_are_computed_once_and_tokens_match_the_plain_model(name: str) -> None:
    model, requests = zoo.build(name), sharing_requests()
    account = shared_prefix.generate_many(model, requests, n_prefix_chunks=2)
    expected = [zoo.plain_greedy(model, list(each.prompt_token_ids), each.max_new_tokens) for each in requests]
    assert account.token_ids == expected
    lanes = [lane for step in account.steps for lane in step.values()]
    assert [lane.num_tokens for lane in lanes].count(32) == 2
    assert all(0 <= lane.num_padding <= lane.num_tokens and lane.num_padding_keys >= 0 for lane in lanes)


def test_a_broadcast_cache_is_the_same_storage() -> None:
    cache = DynamicCache()
    cache.update(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), 0)
    broadcast = shared_prefix.broadcast_kv(cache, 7)
    assert broadcast.layers[0].keys.shape == (7, 2, 5, 4)
    assert broadcast.layers[0].keys.data_ptr() == cache.layers[0].keys.data_ptr()
    assert (
        broadcast.layers[0].values.untyped_storage().data_ptr() == cache.layers[0].values.untyped_storage().data_ptr()
    )


def test_common_prefixes_are_whole_chunks_and_leave_each_request_a_token() -> None:
    find = shared_prefix.find_common_chunk_prefix
    assert find([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 2) == 4
    assert find([[1, 2, 3, 4], [1, 2, 3, 4]], 2) == 2
    assert find([[1, 2, 3, 9, 5], [1, 2, 3, 4, 6]], 2) == 2
    assert find([[1], [1]], 2) == 0
    groups = shared_prefix.group_by_prefix([[1, 2, 3], [1, 2, 4], [9, 9, 9]], n_prefix_chunks=1, chunk_size=2)
    assert list(groups.values()) == [[0, 1], [2]]


def test_sampling_is_seeded() -> None:
    model, requests = zoo.build("llama"), sharing_requests()[::2]
    runs = [Run(requests) for _ in range(3)]
    for account, seed in zip(runs, (1, 1, 2), strict=True):
        with torch.inference_mode():
            shared_prefix.generate_batch(model, account, range(len(requests)), temperature=1.0, seed=seed)
    assert runs[0].token_ids == runs[1].token_ids != runs[2].token_ids


def test_static_reports_how_many_tokens_of_each_row_were_useful() -> None:
    lines: list[str] = []
    requests = [LessonRequest([1, 2], 10), LessonRequest([3], 4)]
    static_batching.run(zoo.build("llama"), requests, 2, log=lines.append)
    first = " ".join(map(str, zoo.plain_greedy(zoo.build("llama"), [1, 2], 10)))
    second = " ".join(map(str, zoo.plain_greedy(zoo.build("llama"), [3], 4)))
    assert lines == [
        "slot 0 <- req 0 (10 token cap): 2 prompt tokens: 1 2",
        "slot 1 <- req 1 (4 token cap): 1 prompt tokens: 3",
        f"slot 0: req 0 is done, 10 of 10 tokens useful: {first}",
        f"slot 1: req 1 is done, 4 of 10 tokens useful: {second}",
        "--- barrier: wave 0 is done ---",
    ]
