"""`/v1/completions` with the `openai` client: the offline engine's results in OpenAI's format."""

import asyncio
import json
import re
from typing import Any

import pytest

from inflight import LLM, SamplingParams
from tests.server.serving import HELLO, RunningServer, read_until, send
from tests.stepper import Stepper

PROMPT = "Once upon a time"
GREEDY = {"temperature": 0, "max_tokens": 12}


def text_of(offline: LLM, prompt: Any, **params: Any) -> str:
    (output,) = offline.generate([prompt], SamplingParams(**{**GREEDY, **params}), use_tqdm=False)
    return output.outputs[0].text


def stream(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream; the last must be [DONE]."""
    response = server.http.post("/v1/completions", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last, nothing = response.text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_a_prompt_is_completed(server: RunningServer, offline: LLM) -> None:
    answer = server.client.completions.create(model="stories", prompt=PROMPT, **GREEDY)
    (choice,) = answer.choices
    assert answer.model == "stories"
    assert answer.object == "text_completion"
    assert choice.text == text_of(offline, PROMPT)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 12, 17)
    assert server.observer.take_reasons() == ["length"]


def test_sixteen_tokens_by_default_and_the_defaults_of_the_model(server: RunningServer) -> None:
    answer = server.complete(prompt=[5, 6, 7], ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    (_, output) = server.observer.ends[-1]
    assert output is not None
    server.complete(prompt=[5, 6, 7], seed=3, temperature=0.8, top_p=0.95)
    texts = {server.complete(prompt=PROMPT, seed=3, max_tokens=9)["choices"][0]["text"] for _ in range(2)}
    explicit = server.complete(prompt=PROMPT, seed=3, max_tokens=9, temperature=0.8, top_p=0.95)
    assert texts == {explicit["choices"][0]["text"]}  # the defaults in its generation_config.json


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [(PROMPT, 1), ([5, 6, 7], 1), ([PROMPT, "The fox"], 2), ([[5, 6, 7], [8, 9], [5]], 3), ([PROMPT], 1), ([[5]], 1)],
)
def test_prompts_of_every_kind_are_accepted(server: RunningServer, offline: LLM, prompt: Any, num_prompts: int) -> None:
    answer = server.client.completions.create(model="stories", prompt=prompt, n=2, **GREEDY)
    prompts = prompt if num_prompts > 1 or isinstance(prompt[0], list) or prompt == [PROMPT] else [prompt]
    assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
    assert [choice.text for choice in answer.choices] == [text_of(offline, each) for each in prompts for _ in range(2)]
    events = stream(server, prompt=prompt, n=2, **GREEDY)
    texts = [""] * (2 * num_prompts)
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice.text for choice in answer.choices]


def test_a_stream_has_the_same_text_and_ends_with_the_usage(server: RunningServer) -> None:
    whole = server.client.completions.create(model="stories", prompt=PROMPT, **GREEDY)
    chunks = list(
        server.client.completions.create(
            model="stories", prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    *deltas, last = chunks
    assert "".join(chunk.choices[0].text for chunk in deltas) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in deltas)
    assert len({chunk.id for chunk in chunks}) == 1
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens == 17


def test_every_chunk_can_carry_the_usage_so_far(server: RunningServer) -> None:
    events = stream(
        server, prompt=PROMPT, **GREEDY, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert {event["usage"]["prompt_tokens"] for event in events} == {5}


def test_the_usage_grows_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Stepper(monkeypatch)
    body = {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True, "stream": True, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    with RunningServer(steps.llm) as server, server.connection() as connection:
        steps.allow(1)
        send(connection, "/v1/completions", **body)
        begin = read_until(connection, b"}\n\n")
        assert re.findall(rb'"completion_tokens": ?(\d+)', begin) == [b"1"]
        steps.allow()
        end = read_until(connection, b"data: [DONE]")
        counts = [int(count) for count in re.findall(rb'"completion_tokens": ?(\d+)', end)]
        assert counts == sorted(counts)
        assert counts[0] > 1
        assert counts[-1] == 12
        server.check_idle()


def test_concurrent_async_streams_get_their_own_texts(server: RunningServer, offline: LLM) -> None:
    prompts = [f"{name} went" for name in ("Tom", "Mia", "Ben", "The fox", "A bird")]

    async def follow(client: Any, prompt: str) -> str:
        chunks = await client.completions.create(model="stories", prompt=prompt, stream=True, **GREEDY)
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def check() -> None:
        async with server.async_client as client:
            texts = await asyncio.gather(*(follow(client, prompt) for prompt in prompts))
        assert texts == [text_of(offline, prompt) for prompt in prompts]

    asyncio.run(check())


def test_cached_prompt_tokens_are_reported(server: RunningServer) -> None:
    prompt = list(range(40, 90))
    first = server.complete(prompt=prompt, max_tokens=1, cache_salt="mine")
    again = server.complete(prompt=prompt, max_tokens=1, cache_salt="mine")
    other = server.complete(prompt=prompt, max_tokens=1, cache_salt="another's")
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, again, other)]
    assert cached == [0, 48, 0]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_ends_the_completion(server: RunningServer, offline: LLM, is_stream: bool) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, **GREEDY, "max_tokens": 40, "stop": [" a", "zzz"]}
    expected = text_of(offline, PROMPT, max_tokens=40, stop=[" a"])
    if is_stream:
        choices = [event["choices"][0] for event in stream(server, **body)]
    else:
        choices = server.complete(**body)["choices"]
    assert "".join(choice["text"] for choice in choices) == expected
    assert choices[-1]["finish_reason"] == "stop"
    kept = server.complete(**body, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == expected + " a"
    assert kept["stop_reason"] == " a"


def test_sampling_parameters_reach_the_engine(server: RunningServer, offline: LLM) -> None:
    def text(**options: Any) -> str:
        return str(server.complete(prompt=PROMPT, **{**GREEDY, **options})["choices"][0]["text"])

    (comma,) = server.http.post("/tokenize", json={"prompt": ",", "add_special_tokens": False}).json()["tokens"]
    assert text().startswith(",")
    assert "," not in text(logit_bias={str(comma): -100})
    assert text(logit_bias={str(comma): 100}) == "," * 12
    assert "there" in text()
    assert "there" not in text(bad_words=["there"])
    plain = text(max_tokens=40)
    for penalty in ({"repetition_penalty": 100.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        answer = text(**penalty, max_tokens=40)
        assert answer == text_of(offline, PROMPT, **penalty, max_tokens=40)
        assert answer != plain
    for choice in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}, {"temperature": 3.0}):
        chosen = {"temperature": 1.5, "seed": 7, "top_p": 1.0, **choice}
        assert text(**chosen) == text_of(offline, PROMPT, **chosen)
    assert text(truncate_prompt_tokens=1) != text()
    assert text(seed=-1, temperature=1) == text(seed=-1, temperature=1) != text(seed=1, temperature=1)


def test_echo_returns_the_prompt_with_the_completion(server: RunningServer, offline: LLM) -> None:
    text = text_of(offline, PROMPT)
    assert server.complete(prompt=PROMPT, echo=True, **GREEDY)["choices"][0]["text"] == PROMPT + text
    events = stream(server, prompt=[PROMPT, "The fox"], echo=True, **GREEDY)
    texts = ["", ""]
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [PROMPT + text, "The fox" + text_of(offline, "The fox")]
    tokens = server.http.post("/tokenize", json={"prompt": PROMPT, "add_special_tokens": False}).json()["tokens"]
    assert server.complete(prompt=tokens, echo=True, **GREEDY)["choices"][0]["text"].startswith(PROMPT)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_prompt_is_scored_and_echoed_without_new_tokens(server: RunningServer, is_stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2}
    if is_stream:
        *others, last = stream(server, **body, stream_options={"include_usage": True})
        assert len(others) == 1
        (choice,), usage = others[0]["choices"], last["usage"]
    else:
        answer = server.complete(**body)
        (choice,), usage = answer["choices"], answer["usage"]
    told = choice["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert usage["completion_tokens"] == 0
    assert told["tokens"] == ["<s>", "Once", " upon", " a", " time"]
    assert told["text_offset"] == [0, 0, 4, 9, 11]
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    for token, logprob, top in zip(
        *(told[name][1:] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert logprob < 0
        assert top[token] == logprob
        assert 2 <= len(top) <= 3
        assert max(top.values()) >= logprob


def test_logprobs_match_the_offline_engine(server: RunningServer, offline: LLM) -> None:
    whole = server.client.completions.create(model="stories", prompt=PROMPT, logprobs=3, echo=True, **GREEDY)
    told = whole.choices[0].logprobs
    assert told is not None
    params = SamplingParams(**GREEDY, logprobs=3, prompt_logprobs=3)
    (output,) = offline.generate([PROMPT], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    positions = output.prompt_logprobs + output.outputs[0].logprobs
    expected = [None if position is None else position[i].logprob for i, position in zip(ids, positions, strict=True)]
    assert told.token_logprobs is not None
    assert told.token_logprobs[0] is expected[0] is None
    assert told.token_logprobs[1:] == pytest.approx(expected[1:], rel=1e-4, abs=1e-4)
    assert "".join(told.tokens or []) == "<s>" + whole.choices[0].text
    for token, offset in list(zip(told.tokens or [], told.text_offset or [], strict=True))[1:]:
        assert whole.choices[0].text[offset:].startswith(token)
    events = stream(server, prompt=PROMPT, logprobs=3, echo=True, **GREEDY)
    streamed = [event["choices"][0]["logprobs"] for event in events]
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):  # the same bits in any batch
        assert [entry for piece in streamed for entry in piece[name]] == getattr(told, name)


def test_best_of_returns_the_most_likely_sequences(server: RunningServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 1.5, "seed": 5}
    every = server.complete(**body, n=6, logprobs=0)["choices"]
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    best = server.complete(**body, n=2, best_of=6)
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in best["choices"]] == [None, None]
    assert best["usage"]["completion_tokens"] == sum(len(each["logprobs"]["tokens"]) for each in every)


def test_prompt_logprobs_come_with_the_first_chunk_of_each_choice(server: RunningServer) -> None:
    asked = {"prompt": [[0, 467, 496], [0, 467]], "prompt_logprobs": 2, "n": 2, **GREEDY, "temperature": 1}
    whole = server.complete(**asked)["choices"]
    firsts: dict[int, Any] = {}
    with server.http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    is_first = choice["index"] not in firsts
                    assert ("prompt_logprobs" in choice) == is_first
                    if is_first:
                        firsts[choice["index"]] = choice["prompt_logprobs"]
    assert firsts == {choice["index"]: choice["prompt_logprobs"] for choice in whole}


def test_prompt_logprobs_of_a_chat_come_first(server: RunningServer) -> None:
    asked = {"messages": HELLO, "prompt_logprobs": 1, "max_tokens": 3}
    whole = server.http.post("/v1/chat/completions", json=asked).json()
    with server.http.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    first, *others = chunks
    assert first["choices"] == []
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    assert not any("prompt_logprobs" in chunk for chunk in others)


def test_prompt_logprobs_and_token_ids_match_the_format_of_vllm(server: RunningServer) -> None:
    (choice,) = server.complete(prompt=[0, 467, 496], prompt_logprobs=2, return_token_ids=True, **GREEDY)["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second["467"]["decoded_token"] == "Once"
    assert third["496"]["rank"] == 1
    assert set(third["496"]) == {"logprob", "rank", "decoded_token"}
    assert choice["prompt_token_ids"] == [0, 467, 496]
    assert len(choice["token_ids"]) == 12
    events = stream(server, prompt=[0, 467, 496], return_token_ids=True, **GREEDY)
    streamed = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert streamed == choice["token_ids"]
    assert events[0]["choices"][0]["prompt_token_ids"] == [0, 467, 496]
