"""`/v1/chat/completions` with the `openai` client: the prompt of the chat template, the answer in OpenAI's format."""

import asyncio
from typing import Any

import openai
import pytest

from inflight import LLM, SamplingParams
from tests.server.serving import HELLO, RunningServer

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def expected(offline: LLM) -> str:
    (output,) = offline.chat([HELLO], SamplingParams(**GREEDY), use_tqdm=False)  # type: ignore[list-item]
    return output.outputs[0].text


def test_a_chat_is_answered(server: RunningServer, expected: str) -> None:
    answer = server.client.chat.completions.create(model="stories", messages=HELLO, **GREEDY)  # type: ignore[arg-type]
    (choice,) = answer.choices
    assert (answer.object, answer.model) == ("chat.completion", "stories")
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens_details is not None


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(server: RunningServer, expected: str) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    chunks = list(server.client.chat.completions.create(model="stories", messages=HELLO, **GREEDY, **options))  # type: ignore[arg-type]
    *deltas, last = chunks
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(2):
        mine = [chunk.choices[0] for chunk in deltas if chunk.choices[0].index == index]
        assert (mine[0].delta.role, mine[0].delta.content) == ("assistant", "")
        assert [choice.delta.role for choice in mine[1:]] == [None] * (len(mine) - 1)
        assert "".join(choice.delta.content or "" for choice in mine) == expected
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["length"]
    assert (last.choices, last.usage and last.usage.completion_tokens) == ([], 40)


def test_an_async_stream_is_assembled_by_the_client(server: RunningServer, expected: str) -> None:
    async def check() -> None:
        async with server.async_client as client:
            stream = client.chat.completions.stream(model="stories", messages=HELLO, temperature=0)  # type: ignore[arg-type]
            async with stream as events:
                texts = [event.delta async for event in events if event.type == "content.delta"]
                answer = await events.get_final_completion()
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content == "".join(texts)
        assert "".join(texts).startswith(expected)

    asyncio.run(check())


def test_a_predicted_answer_is_the_same_and_says_how_much_was_right(server: RunningServer, expected: str) -> None:
    for content in (expected, [{"type": "text", "text": expected}]):
        prediction: Any = {"type": "content", "content": content}
        answer = server.client.chat.completions.create(
            model="stories", messages=HELLO, prediction=prediction, extra_body={"speculation": True}, **GREEDY
        )
        assert answer.choices[0].message.content == expected
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert details.accepted_prediction_tokens is not None
        assert details.rejected_prediction_tokens is not None


def test_an_answer_without_a_limit_ends_at_eos(server: RunningServer) -> None:
    answer = server.client.chat.completions.create(model="stories", messages=HELLO, temperature=0)  # type: ignore[arg-type]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 20
    short = server.client.chat.completions.create(
        model="stories",
        messages=HELLO,  # type: ignore[arg-type]
        max_completion_tokens=3,
        max_tokens=50,
    )
    assert short.usage is not None
    assert short.usage.completion_tokens == 3


def test_log_probabilities_are_reported_in_the_chat_format(server: RunningServer, expected: str) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    whole = server.client.chat.completions.create(model="stories", messages=HELLO, **GREEDY, **options)  # type: ignore[arg-type]
    told = whole.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert "".join(entry.token for entry in told.content) == expected
    for entry in told.content:
        assert bytes(entry.bytes or []).decode() == entry.token
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy
    chunks = server.client.chat.completions.create(model="stories", messages=HELLO, stream=True, **GREEDY, **options)  # type: ignore[arg-type]
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in told.content]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in told.content])
    own = server.client.chat.completions.create(model="stories", messages=HELLO, logprobs=True, **GREEDY)  # type: ignore[arg-type]
    assert own.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in own.choices[0].logprobs.content or []] == [[]] * 20


def tokens_of(server: RunningServer, **body: Any) -> list[int]:
    response = server.http.post("/v1/chat/completions", json={"max_tokens": 1, "return_token_ids": True, **body})
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["prompt_token_ids"]
    return tokens


def test_the_prompt_of_a_chat(server: RunningServer) -> None:
    def text(**body: Any) -> str:
        return str(server.http.post("/detokenize", json={"tokens": tokens_of(server, **body)}).json()["prompt"])

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "three"}]
    assert text(messages=chat) == "<s><|user|>one\ntwo<|end|><|assistant|>three<|end|><|assistant|>"
    assert text(messages=chat, continue_final_message=True) == "<s><|user|>one\ntwo<|end|><|assistant|>three"
    assert text(messages=chat, add_generation_prompt=False) == "<s><|user|>one\ntwo<|end|><|assistant|>three<|end|>"
    unchanged = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "store": False, "user": "me"}
    harmless = {
        "role": "assistant",
        "content": "three",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "type": "text",
    }
    assert text(messages=[chat[0], harmless], metadata={"a": "b"}, service_tier="auto", **unchanged) == text(
        messages=chat
    )
    assert text(messages=[{"role": "user", "content": ""}]) == "<s><|user|><|end|><|assistant|>"
    tokens = server.http.post("/tokenize", json={"messages": chat}).json()["tokens"]
    assert tokens == tokens_of(server, messages=chat)


def test_a_refusal_by_the_template_is_reported(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.llm.tokenizer is not None
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('there is no system here') }}{% endif %}"
    monkeypatch.setattr(server.llm.tokenizer.inner, "chat_template", template)
    with pytest.raises(openai.BadRequestError, match="there is no system here") as told:
        server.client.chat.completions.create(model="stories", messages=[{"role": "developer", "content": "Be kind."}])
    assert told.value.param == "messages"


def test_evaluation_harnesses_learn_about_the_tokenizer(server: RunningServer) -> None:
    info = server.http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<s>", "</s>", "<pad>")
    assert (info["model_max_length"], info["tokenizer_class"]) == (1024, "TokenizersBackend")
    assert "<tool_call>" in info["chat_template"]
