"""Conversations continue: content that a chat template or a text model does not support is rewritten and reported, and
the text of all other turns stays the same."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from inflight import AsyncLLM
from inflight.server.chat_format.chat_template import _tell_of
from tests.server.chat_format.scripted import prompt_of, say, scripted_server
from tests.server.fuzz_histories import (
    ALTERNATING,
    APIS,
    CHAT,
    FIRST_ONLY,
    FREE,
    MESSAGES,
    NO_TOOLS,
    RESPONSES,
    SHORT_IDS,
    check_case,
)
from tests.server.serving import RunningServer


@pytest.fixture(scope="module")
def scripted() -> Iterator[RunningServer]:
    with scripted_server(FREE) as server:
        say(server, "Yes.")
        yield server


@pytest.fixture
def server(scripted: RunningServer, request: pytest.FixtureRequest) -> RunningServer:
    """A server whose model has the template that the test's parameter `template` is, or `FIRST_ONLY`."""
    callspec = getattr(request.node, "callspec", None)
    template = FIRST_ONLY if callspec is None else callspec.params.get("template", FIRST_ONLY)
    scripted.llm.tokenizer.inner.chat_template = template  # type: ignore[union-attr]
    return scripted


def asked(server: RunningServer, path: str, chat: Any, **fields: Any) -> tuple[str, list[str]]:
    """The prompt that a chat becomes, and what the answer says was ignored."""
    chat = {"input" if path == RESPONSES else "messages": chat}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    response = server.http.post(path, json={**chat, limit: 3, **fields})
    assert response.status_code == 200, response.text
    names = response.headers.get("x-inflight-ignored-fields")
    return prompt_of(server).removeprefix("<s>"), names.split(", ") if names else []


def turns(*texts: str) -> list[dict[str, str]]:
    """Messages from "s: text" and so on."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [{"role": roles[text[0]], "content": text[3:]} for text in texts]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("template", "middle"),
    [
        (FREE, "[s]B;[u]3;"),
        (FIRST_ONLY, "[u]B\n\n3;"),
        (ALTERNATING, "[u]B\n\n3;"),
    ],
)
def test_system_messages_in_mid_chat(server: RunningServer, path: str, template: str, middle: str) -> None:
    begun = turns("s: A", "u: 1", "a: 2")
    before, _ = asked(server, path, [*begun, *turns("u: 3")])
    chat = [*begun, *turns("s: B", "u: 3")]
    (written, names) = asked(server, path, chat)
    assert written == f"[s]A;[u]1;[a]2;{middle}[a]"
    assert before == "[s]A;[u]1;[a]2;[u]3;[a]"
    assert names == ([] if template == FREE else ["role"])
    later, _ = asked(server, path, [*chat, *turns("a: 4", "u: 5", "s: C", "a: 6", "u: 7")])
    assert later.startswith(written)
    assert later.endswith("[u]7;[a]")
    assert ("[s]C;" if template == FREE else "[u]5\n\nC;") in later


@pytest.mark.parametrize("template", [FIRST_ONLY, ALTERNATING])
def test_system_messages_at_first_are_one(server: RunningServer, template: str) -> None:
    """Codex sends instructions and a developer's message."""
    chat = turns("d: B", "u: 1")
    expected = ("[s]A\n\nB;[u]1;[a]", ["role"])
    assert asked(server, RESPONSES, chat, instructions="A") == expected
    assert asked(server, CHAT, [*turns("s: A"), *chat]) == expected


def test_a_refusal_of_a_template_is_logged_once(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    _tell_of.cache_clear()
    for _ in range(2):
        asked(server, CHAT, turns("u: 1", "s: A"))
    (said,) = [each.getMessage() for each in caplog.records if "refuses" in each.getMessage()]
    assert said == "the chat template refuses some histories, which are rewritten: role"


def test_what_a_template_takes_stays_as_it_is_when_something_else_is_refused(server: RunningServer) -> None:
    template = FIRST_ONLY.replace("not loop.first", "loop.index0 > 1")  # two at the beginning
    server.llm.tokenizer.inner.chat_template = template  # type: ignore[union-attr]
    begun = turns("s: A", "d: B", "u: 1")
    assert asked(server, CHAT, begun) == ("[s]A;[s]B;[u]1;[a]", [])
    assert asked(server, CHAT, [*begun, *turns("a: 2", "s: C")]) == ("[s]A;[s]B;[u]1;[a]2;[u]C;[a]", ["role"])


def test_what_no_form_mends_is_refused_in_the_words_about_the_chat_as_it_was_sent(server: RunningServer) -> None:
    template = "{{ raise_exception('no ' + messages[1].role) }}"
    server.llm.tokenizer.inner.chat_template = template  # type: ignore[union-attr]
    answer = server.http.post(CHAT, json={"messages": turns("u: 1", "s: A")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert answer.json()["error"]["message"].endswith(": no system")


# ------------------------------------------------------------------------------------- arguments


def with_call(path: str, arguments: str, result: Any = "20 C") -> list[dict[str, Any]]:
    """A chat with a call and its result."""
    ask, more = turns("u: 1", "u: 2")
    if path == RESPONSES:
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        return [ask, call, {"type": "function_call_output", "call_id": "c", "output": result}, more]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [ask, called, {"role": "tool", "tool_call_id": "c", "content": result}, more]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("template", [FIRST_ONLY, FREE])
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"path": "a', '{"path": "a'),
        ("[]", "[]"),
        ("null", "None"),
        ('"x"', "x"),
        ('{"a": 1}{"b": 2}', '{"a": 1}{"b": 2}'),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
    ],
)
def test_arguments_that_are_no_object(
    server: RunningServer, path: str, template: str, arguments: str, shown: str
) -> None:
    chat = with_call(path, arguments)
    name = "arguments" if template == FIRST_ONLY else "a"
    written, names = asked(server, path, chat)
    assert f"[a]<{name}>{shown};[t]20 C;[u]2;" in written
    assert names == (["arguments"] if template == FIRST_ONLY else [])
    if template == FIRST_ONLY:  # nothing but what was refused is written in another form
        later, names = asked(server, path, [*chat, *turns("a: 3", "s: A", "u: 4")])
        assert later == f"{written.removesuffix('[a]')}[a]3;[u]A\n\n4;[a]"
        assert names == ["role", "arguments"]


def test_the_input_of_a_call_that_is_no_object(server: RunningServer) -> None:
    used = {"type": "tool_use", "id": "c", "name": "f", "input": '{"path": "a'}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "cut off"}
    chat = [*turns("u: 1"), {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    assert asked(server, MESSAGES, chat) == ('[u]1;[a]<arguments>{"path": "a;[t]cut off;[a]', ["arguments"])


# ------------------------------------------------------------------------------------- what is no text

PICTURE = "[image omitted: it cannot be read here]"
PARTS: dict[str, list[tuple[dict[str, Any], str]]] = {
    CHAT: [({"type": "image_url", "image_url": {"url": "data:"}}, PICTURE)],
    RESPONSES: [
        ({"type": "input_image", "image_url": "data:"}, PICTURE),
        (
            {"type": "input_file", "filename": "a.pdf", "file_data": "x"},
            "[file 'a.pdf' omitted: it cannot be read here]",
        ),
    ],
    MESSAGES: [
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}, PICTURE),
        (
            {"type": "document", "title": "A", "source": {"type": "url", "url": "http://a"}},
            "[document 'A' omitted: it cannot be read here]",
        ),
        (
            {"type": "search_result", "source": "a", "title": "B", "content": [{"type": "text", "text": "C"}]},
            "[search result 'B' omitted: it cannot be read here]",
        ),
        (
            {"type": "tool_reference", "tool_name": "Bash"},
            "[tool reference 'Bash' omitted: it cannot be read here]",
        ),
    ],
}
CASES = [(path, *case) for path, cases in PARTS.items() for case in cases]


def seen(path: str, part: dict[str, Any]) -> list[dict[str, Any]]:
    """A chat in which a tool's result has text and this part, and the user's next message the part alone."""
    result = [{"type": "input_text" if path == RESPONSES else "text", "text": "Seen:"}, part]
    if path != MESSAGES:
        *rest, more = with_call(path, "{}", result)
        return [*rest, {**more, "content": [part]}]
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    content = [{"type": "tool_result", "tool_use_id": "c", "content": result}, part]
    return [*turns("u: 1"), {"role": "assistant", "content": [used]}, {"role": "user", "content": content}]


@pytest.mark.parametrize(("path", "part", "placeholder"), CASES)
def test_what_is_no_text_is_named_in_its_place(
    server: RunningServer, path: str, part: dict[str, Any], placeholder: str
) -> None:
    chat = seen(path, part)
    assert asked(server, path, chat) == (f"[u]1;[a];[t]Seen:\n{placeholder};[u]{placeholder};[a]", [part["type"]])
    assert asked(server, path, [*chat, *turns("a: 2", "u: 3")])[0].endswith(f"[u]{placeholder};[a]2;[u]3;[a]")


def test_a_text_of_another_type_is_a_text(server: RunningServer) -> None:
    for part in ({"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "a"}):
        assert asked(server, CHAT, [{"role": "user", "content": [part]}]) == ("[u]a;[a]", [part["type"]])


@pytest.mark.parametrize(
    ("item", "written"),
    [
        (
            {"type": "web_search_call", "id": "ws_1", "action": {}},
            "[a][web search call omitted: it cannot be read here]",
        ),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"},
            "[a][custom tool call 'patch': x]",
        ),
        ({"type": "custom_tool_call_output", "call_id": "c", "output": "Done."}, "[u][custom tool call output: Done.]"),
        ({"type": "agent_message", "role": "assistant", "content": "Hm."}, "[a]Hm."),
    ],
)
def test_items_of_other_tools_are_texts(server: RunningServer, item: dict[str, Any], written: str) -> None:
    assert asked(server, RESPONSES, [*turns("u: 1"), item, *turns("u: 2")]) == (
        f"[u]1;{written};[u]2;[a]",
        [item["type"]],
    )


def test_what_other_models_have_thought_is_left_out(server: RunningServer) -> None:
    thoughts = [{"type": "thinking", "thinking": "", "signature": "x"}, {"type": "redacted_thinking", "data": "x"}]
    chat = [*turns("u: 1"), {"role": "assistant", "content": thoughts}, *turns("u: 2")]
    assert asked(server, MESSAGES, chat) == ("[u]1;[a];[u]2;[a]", ["redacted_thinking"])


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("content", [None, "", []])
def test_empty_contents(server: RunningServer, path: str, content: Any) -> None:
    chat = [*turns("s: A"), {"role": "user", "content": content}]
    assert asked(server, path, chat)[0] == ("[s]A;[a]" if path == RESPONSES else "[s]A;[u];[a]")
    assert asked(server, path, [{"role": "user", "content": content}]) == ("[u];[a]", [])


@pytest.mark.parametrize("path", APIS)
def test_fields_of_newer_clients_inside_a_history(server: RunningServer, path: str) -> None:
    kind = "input_text" if path == RESPONSES else "text"
    part = {"type": kind, "text": "1", "weight": 2}
    chat = [{"role": "user", "content": [part], "audio": {"id": "b"}}]
    written, names = asked(server, path, chat)
    assert (written, set(names)) == ("[u]1;[a]", {"weight", "audio"})
    many = [{**chat[0], **{f"field{number}": 1 for number in range(100)}}]
    assert asked(server, path, many)[1][-1] == "(others)"


def test_a_block_is_of_the_role_that_has_such_blocks(server: RunningServer) -> None:
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": None}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "1"}, used]},
        {"role": "assistant", "content": [result]},
    ]
    assert asked(server, MESSAGES, chat) == ("[u]1;[a]<x>1;[t];[a]", ["role"])
    assert asked(server, MESSAGES, [*turns("u: 1"), {"role": "assistant", "content": [used]}])[0] == "[u]1;[a]<x>1;[a]"


@pytest.mark.parametrize(
    ("template", "written", "named"),
    [
        (SHORT_IDS, r"\[u\]1;\[a\]<f (\w{9})><patch (\w{9})>;\[t\]20 C;\[t\]20 C;\[a\]3;\[u\]2;\[a\]", "tool_call_id"),
        (
            NO_TOOLS,
            r"\[u\]1;\[a\]\[call of f: {}\]\n\[call of patch: \"x\"\];"
            r"\[u\]\[result of f: 20 C\]\n\n\[result of f: 20 C\];\[a\]3;\[u\]2;\[a\]",
            "tool_calls",
        ),
    ],
)
def test_calls_and_ids_that_a_template_cannot_write(
    server: RunningServer, template: str, written: str, named: str
) -> None:
    ask, call, result, more = with_call(CHAT, "{}")
    other = {"id": "d", "type": "custom", "custom": {"name": "patch", "input": "x"}}
    chat = [ask, {**call, "tool_calls": [*call["tool_calls"], other]}, result, result, *turns("a: 3"), more]
    text, names = asked(server, CHAT, chat)
    assert re.fullmatch(written, text)
    assert {"custom", named} <= set(names)


def test_random_histories(scripted: RunningServer) -> None:
    """See `fuzz_histories`, which has many more."""
    assert scripted.llm.tokenizer is not None
    for seed in range(300):
        check_case(seed, scripted.llm.tokenizer)
    for seed in range(300, 320):
        check_case(seed, scripted.llm.tokenizer, scripted.http)


def test_a_strict_server_refuses_what_others_replace() -> None:
    llm = AsyncLLM(num_blocks=200, in_process=True)
    llm.tokenizer.inner.chat_template = FIRST_ONLY  # type: ignore[union-attr]
    with RunningServer(llm, strict=True) as server:

        def refused(path: str, chat: Any) -> str:
            body = {"input": chat} if path == RESPONSES else {"messages": chat, "max_tokens": 3}
            answer = server.http.post(path, json=body)
            assert answer.status_code == 400
            return answer.text

        for path, ((part, _), *_) in PARTS.items():
            assert f"the type is '{part['type']}'" in refused(path, seen(path, part))
        assert "must be at the beginning" in refused(CHAT, turns("u: 1", "s: A", "u: 2"))
        assert "item pairs from a mapping" in refused(CHAT, with_call(CHAT, "[]"))


# ------------------------------------------------------------------------------------- Claude Code's first line

LINE = "x-anthropic-billing-header: cc_version=2.1.97.aaa; cc_entrypoint=cli; cch="


def with_line(path: str, number: str) -> dict[str, Any]:
    system, (ask,) = [f"{LINE}{number};", "Be brief."], turns(f"u: {LINE}1;")
    if path == RESPONSES:
        return {"instructions": "\n".join(system), "input": [ask], "max_output_tokens": 3}
    parts = [{"type": "text", "text": text} for text in system]
    if path == CHAT:
        return {"messages": [{"role": "system", "content": parts}, ask], "max_tokens": 3}
    return {"messages": [ask], "system": parts, **({"max_tokens": 3} if path == MESSAGES else {})}


@pytest.mark.parametrize("path", APIS)
def test_the_line_that_differs_from_turn_to_turn_does_not_reach_the_model(server: RunningServer, path: str) -> None:
    for number in ("00000", "12345"):
        assert server.http.post(path, json=with_line(path, number)).status_code == 200
        assert prompt_of(server).removeprefix("<s>") == f"[s]Be brief.;[u]{LINE}1;;[a]"


def test_the_line_is_not_counted(server: RunningServer) -> None:
    def count(**fields: Any) -> int:
        answer = server.http.post(f"{MESSAGES}/count_tokens", json={"messages": turns("u: 1"), **fields})
        assert answer.headers.get("x-inflight-ignored-fields") == (
            "x-anthropic-billing-header" if LINE in str(fields) else None
        )
        return int(answer.json()["input_tokens"])

    assert count(system=f"{LINE}1;\nA") == count(system="A")


SHOUTING = FREE.replace("m.content", "m.content | upper")


@pytest.mark.parametrize("template", [SHOUTING])
def test_a_text_to_continue_stands_as_it_is(server: RunningServer, template: str) -> None:
    assert SHOUTING != FREE
    assert asked(server, MESSAGES, turns("u: one", "a: Two"))[0] == "[u]ONE;[a]Two"
    assert asked(server, MESSAGES, turns("u: one", "a: Two", "u: three"))[0] == "[u]ONE;[a]TWO;[u]THREE;[a]"
