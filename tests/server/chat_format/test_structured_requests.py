"""Structured output with the `openai` client: the text is valid, or reported as cut off."""

import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.serving import HELLO, RunningServer


class Animal(BaseModel):
    name: Literal["fox", "bear"]
    legs: int = Field(ge=0, le=9)
    friends: list[Literal["owl", "mole"]] = Field(max_length=3)


SCHEMA = {**Animal.model_json_schema(), "additionalProperties": False}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 0, "max_tokens": 200}


def chat(server: RunningServer, **fields: Any) -> str:
    """The text of the answer, which must be complete."""
    answer = server.client.chat.completions.create(model="stories", messages=HELLO, **{**SAMPLED, **fields})  # type: ignore[call-overload]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.tool_calls is None
    return str(answer.choices[0].message.content)


def test_the_answer_is_a_pydantic_model(server: RunningServer) -> None:
    for seed in range(3):
        answer = server.client.chat.completions.parse(
            model="stories",
            messages=HELLO,  # type: ignore[arg-type]
            response_format=Animal,
            **{**SAMPLED, "seed": seed},
        )
        assert isinstance(answer.choices[0].message.parsed, Animal)


def test_a_pydantic_model_in_a_stream(server: RunningServer) -> None:
    with server.client.chat.completions.stream(
        model="stories",
        messages=HELLO,  # type: ignore[arg-type]
        response_format=Animal,
        **{**SAMPLED, "seed": 1},
    ) as events:
        texts = [event.delta for event in events if event.type == "content.delta"]
        answer = events.get_final_completion()
    assert answer.choices[0].message.parsed == Animal.model_validate_json("".join(texts))
    assert chat(server, seed=1, response_format=json_schema()) == "".join(texts)


def json_schema(schema: dict[str, Any] = SCHEMA) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}


def test_the_answer_can_be_any_json_object(server: RunningServer) -> None:
    text = chat(server, response_format={"type": "json_object"}, logit_bias=towards(server, "}"))
    assert isinstance(json.loads(text), dict)


def towards(server: RunningServer, *texts: str) -> dict[str, int]:
    """A bias that makes these tokens more likely than any other allowed token."""
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    return {str(tokenizer.inner.encode(text, add_special_tokens=False)[0]): 50 for text in texts}


EXTENSIONS: dict[str, tuple[dict[str, Any], str]] = {
    "guided_regex": ({"guided_regex": "[ab]{2}-[0-9]"}, "[ab]{2}-[0-9]"),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, "yes|no"),
    "guided_grammar": ({"guided_grammar": 'start: "x" start | "y"'}, "x*y"),
    "guided_json": ({"guided_json": {"enum": ["a", "b"]}}, '"[ab]"'),
    "guided_json as text": ({"guided_json": '{"enum": ["a", "b"]}'}, '"[ab]"'),
    "regex": ({"structured_outputs": {"regex": "[ab]{2}-[0-9]"}}, "[ab]{2}-[0-9]"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    "grammar": ({"structured_outputs": {"grammar": 'start: "x" start | "y"'}}, "x*y"),
    "json": ({"structured_outputs": {"json": {"enum": ["a", "b"]}, "regex": None}}, '"[ab]"'),
    "json_object": ({"structured_outputs": {"json_object": True}, "max_tokens": 1000}, r"\{.*\}"),
    "response_format": ({"response_format": json_schema({"enum": ["a", "b"]})}, '"[ab]"'),
    "text and more": ({"response_format": {"type": "text"}, "guided_choice": ["yes", "no"]}, "yes|no"),
}


@pytest.mark.parametrize("name", EXTENSIONS)
def test_both_interfaces_accept_the_option_names_of_clients(server: RunningServer, name: str) -> None:
    fields, regex = EXTENSIONS[name]
    fields = {**SAMPLED, "logit_bias": towards(server, "y", "}"), **fields}
    if "json" not in name:
        del fields["logit_bias"]
    response = server.http.post("/v1/chat/completions", json={"messages": HELLO, **fields})
    assert response.status_code == 200, response.text
    for choice in (response.json()["choices"][0], server.complete(prompt="Is it?", **fields)["choices"][0]):
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(regex, text, re.DOTALL), text


def test_an_answer_that_is_cut_off_is_reported_as_such(server: RunningServer) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        server.client.chat.completions.parse(
            model="stories",
            messages=HELLO,  # type: ignore[arg-type]
            response_format=Animal,
            max_tokens=3,
        )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"guided_regex": "a", "guided_choice": ["b"]},
            "guided_choice",
            "guided_regex and guided_choice are given; a text can follow only one of them",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"json": {}}},
            "structured_outputs",
            "response_format and structured_outputs.json are given",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "are given; a text can"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "type 'json_schema' and has no json_schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "response_format",
            "of type 'json_object' and has a json_schema, too",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'text', 'json_object' or 'json_schema'"),
        ({"guided_choice": []}, "guided_choice", "at least 1 item"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml", "structured_outputs.yaml is 'a'"),
        ({"guided_json": {"not": {}}}, None, "json_schema has 'not' at #, which cannot be enforced; leave it out"),
        ({"guided_json": "{"}, None, "json_schema is not JSON"),
        ({"guided_regex": "(a"}, None, "regex cannot be enforced"),
        ({"guided_grammar": "start: nothing"}, None, "grammar cannot be enforced"),
        ({"guided_regex": "a", "ignore_eos": True}, None, "ignore_eos is True; it cannot be combined with"),
        ({"guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "does not support it"),
    ],
)
@pytest.mark.usefixtures("strictly")
def test_invalid_formats_are_refused(
    server: RunningServer, path: str, stream: bool, fields: dict[str, Any], param: str | None, message: str
) -> None:
    prompt = {"prompt": "a"} if path == "/v1/completions" else {"messages": HELLO}
    response = server.http.post(path, json={**prompt, "stream": stream, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


def test_schemas_of_any_depth_are_answered(server: RunningServer) -> None:
    for depth in (10, 120, 130, 960, 100_000):
        schema = '{"items":' * depth + "{}" + "}" * depth
        body = f'{{"prompt": "a", "max_tokens": 2, "guided_json": {schema}}}'
        response = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert response.status_code == (200 if depth < 128 else 400), response.text
        assert depth < 128 or "nested too deeply, in more than 128 levels" in response.text
