"""Models that think, through all APIs: the `openai` and `anthropic` clients, scripted answers, and real grammars."""

import json
import shutil
from collections.abc import Callable, Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, TextBlock, ThinkingBlock, ToolUseBlock

from inflight import AsyncLLM, SamplingParams
from inflight.contracts.api.outputs import Logprob, TextDelta
from inflight.demo_model import DEMO_MODEL
from inflight.server.chat_format import chat_template
from inflight.server.chat_format.answer_template import answer_template_of
from inflight.server.responses.answer import AnswerReader
from inflight.text.output_text import OutputText
from tests.server.chat_format.scripted import CALL, ROME, TOOLS, Weather, cut_by_chance, prompt_of, say, scripted_server
from tests.server.chat_format.test_messages_tools import TOOLS as ANTHROPIC_TOOLS
from tests.server.serving import HELLO, RunningServer

TEMPLATE = """{{ bos_token }}{% if tools %}{{ tools | tojson }} answer in <tool_call>{% endif %}\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
"""As Qwen 3 has it."""
ALWAYS = "{% for message in messages %}{{ message.content }}{% endfor %}<|assistant|>{{ '<think>\\n' }}"
HARMONY = "{% for message in messages %}{{ message.content }}{% endfor %}<|channel|><|message|>{{ reasoning_effort }}"

REASONING, ANSWER = "A fox.\nA short one, then.", "Once there was a fox."
TEXT = f"<think>\n{REASONING}\n</think>\n\n{ANSWER}"
BEHIND_A_CALL = f"<think>\n{REASONING}\n</think>\n\nLet me see.\n{CALL}"


@pytest.fixture(scope="module")
def thinker() -> Iterator[RunningServer]:
    with scripted_server(TEMPLATE, trust_request_chat_template=True) as server:
        yield server


@pytest.fixture
def server(thinker: RunningServer) -> Iterator[RunningServer]:
    say(thinker)
    yield thinker
    thinker.check_idle()


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_a_pattern_that_takes_for_ever_ends_only_its_request(
    server: RunningServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.llm.tokenizer is not None
    reasoning = {"open": "<think>", "close_pattern": "(?:a|aa)+$"}
    slow = {"start_anchor": "assistant\n", "fields": {"thinking": reasoning, "content": {}}}
    say(server, "<think>", "a" * 60, "b", "c")
    asked = {"input" if path == "responses" else "messages": HELLO, "max_tokens": 9}
    asked["max_output_tokens" if path == "responses" else "max_tokens"] = asked.pop("max_tokens")
    said = "a pattern of 'thinking' in this model's response template takes too long"
    with monkeypatch.context() as patched:
        patched.setattr(server.llm.tokenizer.inner, "response_template", slow, raising=False)
        whole = server.http.post(f"/v1/{path}", json=asked)
        assert whole.status_code == 500
        assert said in whole.text
        streamed = server.http.post(f"/v1/{path}", json={**asked, "stream": True})
        assert said in streamed.text.splitlines()[-2]
        assert server.http.get("/health").status_code == 200
    say(server, ANSWER)
    assert chat(server)["choices"][0]["message"]["content"] == ANSWER


# ------------------------------------------------------------------------------------- chats


def chat(server: RunningServer, **fields: Any) -> dict[str, Any]:
    response = server.http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def streamed(server: RunningServer, **fields: Any) -> tuple[dict[str, str], str]:
    """The deltas of a stream, joined by their names, and the finish reason."""
    asked: dict[str, Any] = {"model": "stories", "messages": HELLO, "stream": True, **fields}
    joined: dict[str, str] = {}
    reason = ""
    for chunk in server.client.chat.completions.create(**asked):
        for choice in chunk.choices:
            for name, value in choice.delta.model_dump().items():
                if isinstance(value, str):
                    joined[name] = joined.get(name, "") + value
            reason = choice.finish_reason or reason
    return joined, reason


@pytest.mark.parametrize("seed", range(3))
def test_a_chat_has_reasoning_under_both_names(server: RunningServer, seed: int) -> None:
    say(server, *cut_by_chance(TEXT, seed))
    answer = chat(server)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == (REASONING, REASONING, ANSWER)
    assert server.llm.tokenizer is not None
    num_reasoning_tokens = len(server.llm.tokenizer.encode(REASONING, add_special_tokens=False))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning_tokens}
    deltas, reason = streamed(server)
    assert deltas == {"role": "assistant", "reasoning": REASONING, "reasoning_content": REASONING, "content": ANSWER}
    assert reason == "stop"


def test_the_usage_of_a_stream_counts_reasoning(server: RunningServer) -> None:
    say(server, *cut_by_chance(TEXT, 0))
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = server.client.chat.completions.create(model="stories", messages=HELLO, **options)  # type: ignore[call-overload]
    assert last.usage.completion_tokens_details.reasoning_tokens > 5


def test_reasoning_can_be_left_out(server: RunningServer) -> None:
    say(server, TEXT)
    message = chat(server, include_reasoning=False)["choices"][0]["message"]
    assert message == {"role": "assistant", "refusal": None, "content": ANSWER}
    assert streamed(server, extra_body={"include_reasoning": False})[0] == {"role": "assistant", "content": ANSWER}


def test_calls_follow_reasoning(server: RunningServer) -> None:
    say(server, *cut_by_chance(BEHIND_A_CALL, 1))
    choice = chat(server, tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == REASONING
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert Weather.model_validate_json(call["function"]["arguments"]) == ROME


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_the_chat_template_gets_earlier_reasoning(server: RunningServer, name: str) -> None:
    say(server, ANSWER)
    chat(server, messages=[*HELLO, {"role": "assistant", "content": "Once.", name: "Hm."}, *HELLO])
    assert "<think>\nHm.\n</think>\n\nOnce.<|im_end|>" in prompt_of(server)


NOT_THINKING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "assistant\n"),
        ({"reasoning_effort": "high"}, "assistant\n"),
        ({"reasoning_effort": "none"}, NOT_THINKING),
        ({"thinking_token_budget": 0}, NOT_THINKING),
        ({"chat_template_kwargs": {"enable_thinking": False}}, NOT_THINKING),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, "assistant\n"),
        ({"chat_template": ALWAYS, "reasoning_effort": "low"}, "<think>\n"),
        ({"chat_template": ALWAYS, "reasoning_effort": "none"}, "<think>\n\n</think>\n\n"),
        ({"chat_template": HARMONY, "reasoning_effort": "low"}, "<|message|>low"),
        ({"chat_template": "{{ 'x' }}", "reasoning_effort": "none"}, "x"),
    ],
)
def test_the_model_is_told_whether_to_think(server: RunningServer, fields: dict[str, Any], end: str) -> None:
    say(server, ANSWER)
    chat(server, **fields)
    assert prompt_of(server).endswith(end)


def test_a_model_that_cannot_be_told_not_to_think_is_said_to_be_one(server: RunningServer) -> None:
    body = {"messages": HELLO, "chat_template": HARMONY, "reasoning_effort": "none"}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "turns reasoning off, which is not supported" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "reasoning_effort"


@pytest.mark.parametrize(
    ("template", "end"), [(TEMPLATE, NOT_THINKING), (ALWAYS, "<think>\n\n</think>\n\n"), (HARMONY, "<|message|>")]
)
def test_a_summary_is_written_without_reasoning_if_the_model_can_be_told(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, template: str, end: str
) -> None:
    monkeypatch.setattr(server.llm.tokenizer.inner, "chat_template", template)  # type: ignore[union-attr]
    say(server, ANSWER)
    assert server.http.post("/v1/responses/compact", json={"input": "1"}).status_code == 200
    assert prompt_of(server).endswith(end)


# ------------------------------------------------------------------------------------- messages


def messages(server: RunningServer, **fields: Any) -> tuple[Message, Message]:
    """The whole answer, and the answer that the client assembles from a stream."""
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "stories", "messages": HELLO, "max_tokens": 300, **fields}
    with client.messages.stream(**asked) as stream:
        return client.messages.create(**asked), stream.get_final_message()


@pytest.mark.parametrize("seed", range(2))
def test_messages_have_blocks_of_reasoning(server: RunningServer, seed: int) -> None:
    say(server, *cut_by_chance(BEHIND_A_CALL, seed))
    for answer in messages(server, thinking={"type": "adaptive"}, tools=ANTHROPIC_TOOLS):
        reasoning, text, call = answer.content
        assert isinstance(reasoning, ThinkingBlock)
        assert (reasoning.thinking, bool(reasoning.signature)) == (REASONING, True)
        assert isinstance(text, TextBlock)
        assert text.text == "Let me see."
        assert isinstance(call, ToolUseBlock)
        assert answer.stop_reason == "tool_use"
        assert answer.usage.output_tokens_details is not None
        assert answer.usage.output_tokens_details.thinking_tokens > 5


def test_reasoning_may_be_omitted_from_messages(server: RunningServer) -> None:
    say(server, *cut_by_chance(TEXT, 4))
    for answer in messages(server, thinking={"type": "adaptive", "display": "omitted"}):
        reasoning, text = answer.content
        assert isinstance(reasoning, ThinkingBlock)
        assert reasoning.thinking == ""
        assert isinstance(text, TextBlock)
        assert text.text == ANSWER


def test_an_answer_that_is_cut_off_in_reasoning_has_no_text(server: RunningServer) -> None:
    say(server, "<think>\nHm")
    for answer in messages(server):
        assert [block.type for block in answer.content] == ["thinking"]


def test_the_chat_template_gets_reasoning_of_earlier_turns(server: RunningServer) -> None:
    say(server, ANSWER)
    turns = [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Once."}, {"type": "redacted_thinking", "data": "y"}],
        },
    ]
    messages(server, messages=[*HELLO, *turns, *HELLO])
    assert "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nOnce.<|im_end|>" in prompt_of(server)


def test_messages_tell_the_model_not_to_think(server: RunningServer) -> None:
    say(server, ANSWER)
    messages(server, thinking={"type": "disabled"})
    assert prompt_of(server).endswith(NOT_THINKING)
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    counted = [
        client.messages.count_tokens(model="stories", messages=HELLO, thinking={"type": kind}).input_tokens  # type: ignore[arg-type,misc,typeddict-item]
        for kind in ("disabled", "adaptive")
    ]
    assert counted[0] > counted[1]


# ------------------------------------------------------------------------------------- responses


@pytest.mark.parametrize("seed", range(2))
def test_responses_have_reasoning_items(server: RunningServer, seed: int) -> None:
    say(server, *cut_by_chance(TEXT, seed))
    asked: dict[str, Any] = {"model": "stories", "input": "A story, please."}
    with server.client.responses.stream(**asked) as stream:
        events = list(stream)
        final: Any = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == REASONING
    assert len(deltas) > 1
    for answer in (server.client.responses.create(**asked), final):
        reasoning, message = answer.output
        assert (reasoning.type, reasoning.status, reasoning.content[0].text) == ("reasoning", "completed", REASONING)
        assert message.type == "message"
        assert answer.output_text == ANSWER
        assert answer.usage.output_tokens_details.reasoning_tokens > 5


def test_a_response_is_continued_with_its_reasoning(server: RunningServer) -> None:
    say(server, BEHIND_A_CALL)
    tools: Any = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]
    first = server.client.responses.create(model="stories", input="Warm?", tools=tools)
    say(server, ANSWER)
    call = first.output[-1]
    assert call.type == "function_call"
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "yes"}]
    expected = f"<think>\n{REASONING}\n</think>\n\nLet me see.Weather<|im_end|>"
    server.client.responses.create(model="stories", input=result, previous_response_id=first.id, tools=tools)
    assert expected in prompt_of(server)
    items: Any = [{"role": "user", "content": "Warm?"}, *(item.to_dict() for item in first.output), *result]
    server.client.responses.create(model="stories", input=items, tools=tools)
    assert expected in prompt_of(server)


def test_reasoning_comes_back_encoded(server: RunningServer) -> None:
    """Clients that keep nothing on the server may send back only `encrypted_content`, as Codex does."""
    say(server, TEXT)
    asked: dict[str, Any] = {"model": "stories", "input": "Hi", "include": ["reasoning.encrypted_content"]}
    reasoning, message = (item.to_dict() for item in server.client.responses.create(**asked).output)
    with server.client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output[0].to_dict()["encrypted_content"] == reasoning["encrypted_content"]
    for encoded, is_told in ((reasoning["encrypted_content"], True), ("gAAA", False), ("inflight:?", False)):
        item = {"type": "reasoning", "summary": [], "encrypted_content": encoded}
        asked["input"] = [{"role": "user", "content": "Hi"}, item, message, {"role": "user", "content": "Go on"}]
        server.client.responses.create(**asked)
        assert (f"<think>\n{REASONING}\n</think>" in prompt_of(server)) == is_told


def test_responses_tell_the_model_not_to_think(server: RunningServer) -> None:
    say(server, ANSWER)
    answer = server.client.responses.create(model="stories", input="Hi", reasoning={"effort": "none"})
    assert answer.reasoning is not None
    assert answer.reasoning.effort == "none"
    assert prompt_of(server).endswith(NOT_THINKING)


# ------------------------------------------------------------------------------------- forms, behind reasoning

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def generating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The embedded model, with marks of reasoning for tokens that it seldom generates."""
    folder = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(DEMO_MODEL, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (DEMO_MODEL / name).read_text().replace('"eos_token": "</s>"', '"eos_token": "<|end|>"')
        (folder / name).write_text(text.replace("<pad>", "<think>").replace("</s>", "</think>"))
    for name in ("config.json", "generation_config.json"):
        config = json.loads((DEMO_MODEL / name).read_text())
        (folder / name).write_text(json.dumps({**config, "eos_token_id": 5, "pad_token_id": 5}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    llm = AsyncLLM(folder, num_blocks=500, in_process=True)
    with RunningServer(llm, trust_request_chat_template=True) as server:
        yield server


OPEN = TEMPLATE.replace("{% if enable_thinking is", "<think>\n{% if enable_thinking is")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_open", [False, True])
def test_a_form_is_kept_to_after_the_reasoning(generating: RunningServer, seed: int, is_open: bool) -> None:
    fields = {"chat_template": OPEN} if is_open else {}
    budget = 12
    answer = chat(
        generating,
        response_format=FORM,
        seed=seed,
        temperature=1.0,
        max_tokens=200,
        return_token_ids=True,
        thinking_token_budget=budget,
        **fields,
    )
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    value = json.loads(choice["message"]["content"])
    assert value.keys() == {"name", "old"}
    assert generating.llm.tokenizer is not None
    end = generating.llm.tokenizer.inner.convert_tokens_to_ids("</think>")
    assert choice["token_ids"].count(end) == (1 if is_open or "reasoning" in choice["message"] else 0)
    if is_open:
        assert choice["token_ids"].index(end) <= budget


def test_reasoning_before_free_text_has_a_limit(generating: RunningServer) -> None:
    assert generating.llm.tokenizer is not None
    end = generating.llm.tokenizer.inner.convert_tokens_to_ids("</think>")
    for stop in (None, ["zebra"]):
        answer = chat(
            generating,
            chat_template=OPEN,
            max_tokens=40,
            return_token_ids=True,
            temperature=0,
            stop=stop,
            thinking_token_budget=7,
        )
        (choice,) = answer["choices"]
        assert choice["token_ids"].index(end) == 7
        assert choice["message"]["content"]


def test_stop_strings_act_on_the_answer(generating: RunningServer) -> None:
    """The reasoning has the stop string, too."""
    assert generating.llm.tokenizer is not None
    template = generating.llm.tokenizer.inner.chat_template
    generating.llm.tokenizer.inner.chat_template = OPEN
    more: dict[str, Any] = {"thinking_token_budget": 12, "stop": ["e"], "temperature": 0}
    try:
        choice = chat(generating, **more)["choices"][0]
        deltas, reason = streamed(generating, model="inflight-demo", extra_body=more)
        response = generating.client.responses.create(model="inflight-demo", input=HELLO, extra_body=more)  # type: ignore[arg-type]
        for message in messages(
            generating,
            model="inflight-demo",
            thinking={"type": "enabled", "budget_tokens": 12},
            stop_sequences=["e"],
            extra_body={"temperature": 0},
        ):
            blocks = [block.thinking if isinstance(block, ThinkingBlock) else block.text for block in message.content]  # type: ignore[union-attr]
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "e")
    finally:
        generating.llm.tokenizer.inner.chat_template = template
    reasoning, text = choice["message"]["reasoning_content"], choice["message"]["content"]
    assert "e" in reasoning
    assert text
    assert "e" not in text
    assert choice["finish_reason"] == reason == "stop"
    assert [deltas["reasoning_content"], deltas["content"]] == blocks == [reasoning, text]
    assert [item.content[0].text for item in response.output] == blocks  # type: ignore[union-attr,index]


def test_a_required_call_may_follow_reasoning(generating: RunningServer) -> None:
    asked = {"chat_template": OPEN, "tools": TOOLS, "tool_choice": "required", "thinking_token_budget": 5}
    (choice,) = chat(generating, **asked, max_tokens=200)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"]
    for call in choice["message"]["tool_calls"]:
        assert json.loads(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/chat/completions", {"thinking_token_budget": 5}, "thinking_token_budget"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking"),
    ],
)
def test_a_limit_of_reasoning_whose_end_is_no_token_is_ignored_and_named(
    server: RunningServer, path: str, fields: dict[str, Any], name: str
) -> None:
    response = server.http.post(path, json={"messages": HELLO, "max_tokens": 5, **fields})
    assert response.status_code == 200
    assert response.headers["x-inflight-ignored-fields"] == name


@pytest.mark.parametrize("effort", ["low", "high"])
def test_an_effort_without_a_variable_of_the_template_limits_reasoning(
    generating: RunningServer, effort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chat_template.EFFORT_TOKENS, "low", 7)
    assert generating.llm.tokenizer is not None
    end = generating.llm.tokenizer.inner.convert_tokens_to_ids("</think>")
    asked = {"chat_template": OPEN, "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    (choice,) = chat(generating, reasoning_effort=effort, **asked)["choices"]
    assert (choice["token_ids"].index(end) == 7) == (effort == "low")


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_log_probabilities_in_responses_are_those_of_the_text(generating: RunningServer, tools: list[Any]) -> None:
    """Tokens of reasoning have none, in whole answers and in streams."""
    assert generating.llm.tokenizer is not None
    template = generating.llm.tokenizer.inner.chat_template
    generating.llm.tokenizer.inner.chat_template = OPEN
    asked: dict[str, Any] = {
        "model": "inflight-demo",
        "input": "A story, please.",
        "include": ["message.output_text.logprobs"],
        "temperature": 0,
        "max_output_tokens": 30,
        "tools": [{"type": "function", "strict": None, **tool["function"]} for tool in tools],
        "extra_body": {"thinking_token_budget": 6},
    }
    try:
        whole = generating.client.responses.create(**asked)
        with generating.client.responses.stream(**asked) as stream:
            events = list(stream)
            final: Any = events[-1].response  # type: ignore[union-attr]
    finally:
        generating.llm.tokenizer.inner.chat_template = template
    reasoning, message = whole.output
    assert reasoning.type == "reasoning"
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs
    tokens = "".join(each.token for each in part.logprobs)
    assert tokens.removesuffix("<|end|>").strip() == part.text.strip()
    in_events = [
        each.token for event in events if event.type == "response.output_text.delta" for each in event.logprobs
    ]
    assert in_events == [each.token for each in part.logprobs]
    assert [each.token for each in final.output[1].content[0].logprobs] == in_events


@pytest.mark.parametrize("seed", range(20))
def test_log_probabilities_do_not_depend_on_how_deltas_group_tokens(generating: RunningServer, seed: int) -> None:
    """Tokens without text, marks and held-back text, delivered in groups of any size."""
    chance, tokenizer = Random(seed), generating.llm.tokenizer
    assert tokenizer is not None
    known = answer_template_of(tokenizer, OPEN)
    assert known is not None
    words: list[int] = tokenizer.inner.encode("Once there was a fox. It lived happily.", add_special_tokens=False)
    marks = [int(tokenizer.inner.convert_tokens_to_ids(each)) for each in ("<s>", "</think>", "<|end|>")]
    token_ids = [chance.choice(words + marks * 3) for _ in range(40)]
    answer: Any = SimpleNamespace(
        new_blocks=lambda: known.reader("<|im_start|>assistant\n<think>\n", None, ()),
        tokenizer=tokenizer,
        body=SimpleNamespace(num_logprobs=0),
        generation=SimpleNamespace(prompts=[words], params=SamplingParams()),
    )

    def read(size_of: Callable[[], int]) -> tuple[AnswerReader, list[list[str]]]:
        reader, text, start = AnswerReader(answer), OutputText(tokenizer, words), 0
        of_deltas: dict[int, list[str]] = {}
        while start < len(token_ids):
            group = token_ids[start : start + size_of()]
            start += len(group)
            ending: Any = ("length", None) if start == len(token_ids) else (None, None)
            scores = [{each: Logprob(-1.0, 1)} for each in group]
            delta = TextDelta(0, 0, text.take_in(group, *ending), group, scores, None, *ending)
            for growth, grown in reader.feed(delta):
                of_deltas.setdefault(growth.number, []).extend(each["token"] for each in grown)
        return reader, [of_deltas[i] for i in sorted(of_deltas)]

    expected, expected_deltas = read(lambda: 1)
    reader, deltas = read(lambda: chance.randint(1, 5))
    assert deltas == expected_deltas
    assert reader.logprobs_of == expected.logprobs_of
    assert [each.text for each in reader.blocks.blocks] == [each.text for each in expected.blocks.blocks]
