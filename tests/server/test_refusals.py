"""Every invalid request gets one sentence in OpenAI's error format, with a 4xx status."""

import json
import socket
from typing import Any

import openai
import pytest

from tests.server.serving import HELLO, RunningServer, raw_request

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def error_of(server: RunningServer, path: str, content: bytes, status: int = 400, **headers: str) -> dict[str, Any]:
    headers = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    response = server.http.post(path, content=content, headers=headers)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert list(answer) == ["error"]
    error: dict[str, Any] = answer["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert isinstance(error["message"], str)
    return error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty; it must be a JSON object"),
        (b"{", "the body is not JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
        (b"[]", "the body must be a JSON object"),
        (b"null", "the body must be a JSON object"),
        (b'"text"', "the body must be a JSON object"),
        (b"\xff\xfe{}", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON: it is nested too deeply"),
        (b"[" * 200 + b"]" * 200, "the body is nested too deeply, in more than 128 levels"),
        (b"[" * 200 + b"]", "the body is not JSON: "),
        (b'{"prompt": "' + b"[" * 200 + b'\\"' + b"]" * 200 + b'", "max_tokens": 1.5}', "max_tokens"),
        (b'{"prompt": ' + b"[" * 100_000, "the body is not JSON: it is nested too deeply"),
        (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": "a", "\\udfff": 1}', "half of a surrogate pair"),
        (b'{"prompt": "a", "temperature": NaN}', "none at all (NaN, Infinity)"),
        (b'{"prompt": "a", "temperature": -Infinity}', "none at all (NaN, Infinity)"),
        (b'{"prompt": "a", "temperature": 1e999}', "a number that is too large"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "the body is not JSON"),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(server: RunningServer, body: bytes, message: str) -> None:
    assert message in error_of(server, COMPLETIONS, body)["message"]


HUGE = 10**30


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", 3.5, "prompt is 3.5; it should be a valid string or a valid list"),
        ("prompt", None, "prompt is None; it should be"),
        ("prompt", "", "the prompt is empty"),
        ("prompt", [], "prompt is empty"),
        ("prompt", [[]], "prompt is empty"),
        ("prompt", [""], "the prompt is empty"),
        ("prompt", ["a", 3], "it should be a valid string"),
        ("prompt", [True], "it should be a valid string"),
        ("prompt", [1.0], "it should be a valid string"),
        ("prompt", [-1], "the prompt contains token id -1; the model's vocabulary has the ids from 0 to 1535"),
        ("prompt", [HUGE], f"the prompt contains token id {HUGE}"),
        ("prompt", ["a"] * 17, "17 prompts with 1 sequences each are 17 sequences; this server takes at most 16"),
        (
            "prompt",
            [5] * 1024,
            "1024 tokens; this model's maximum context length is 1024 tokens, and at least one of them",
        ),
        ("max_tokens", -1, "max_tokens is -1; it must be an integer from 1"),
        ("max_tokens", HUGE, f"max_tokens is {HUGE}; it must be"),
        ("max_tokens", 1.5, "max_tokens is 1.5; it should be a valid integer"),
        ("max_tokens", True, "max_tokens is True; it should be a valid integer"),
        ("max_tokens", "1", "max_tokens is '1'; it should be a valid integer"),
        ("n", 0, "n is 0; it must be an integer from 1"),
        ("n", 9, "n is 9; this server takes at most 8"),
        ("best_of", 9, "best_of is 9; this server takes at most 8"),
        ("best_of", 0, "best_of is 0; it should be greater than or equal to 1"),
        ("temperature", -1, "temperature is -1.0; it must be a finite number of at least 0"),
        ("top_p", 0, "top_p is 0.0; it must be a number above 0 and at most 1"),
        ("top_k", -5, "top_k is -5; it must be"),
        ("min_p", 2, "min_p is 2.0; it must be"),
        ("presence_penalty", 3, "presence_penalty is 3.0; it must be a number from -2 to 2"),
        ("frequency_penalty", "x", "frequency_penalty is 'x'; it should be a valid number"),
        ("repetition_penalty", 0, "repetition_penalty is 0.0; it must be"),
        ("seed", HUGE, f"seed is {HUGE}; it must be an integer of 64 bits"),
        ("logprobs", 6, "logprobs is 6; this server takes at most 5"),
        ("logprobs", True, "logprobs is True; it should be a valid integer"),
        ("prompt_logprobs", 6, "prompt_logprobs is 6; this server takes at most 5"),
        ("prompt_logprobs", -1, "prompt_logprobs is -1; it must be"),
        ("logit_bias", {"x": 1}, "logit_bias has 'x'; its keys must be token ids from 0 to 1535, as text"),
        ("logit_bias", {"1536": 1}, "logit_bias has '1536'"),
        ("logit_bias", {str(HUGE): 1}, "logit_bias has '1000"),
        ("logit_bias", {"5": 1000}, "logit_bias[5] is 1000.0; it must be a number from -100 to 100"),
        ("logit_bias", [1], "logit_bias is [1]; it should be a valid dictionary"),
        ("bad_words", [""], "bad_words contains ''"),
        ("stop", "", "stop contains ''; it must be a non-empty string"),
        ("stop", ["a"] * 65, "at most 64 items"),
        ("stop", 5, "stop is 5; it should be a valid string or a valid list"),
        ("stop_token_ids", [HUGE], f"stop_token_ids contains token id {HUGE}"),
        ("stop_token_ids", [None], "stop_token_ids[0] is None; it should be a valid integer"),
        ("min_tokens", 17, "min_tokens is 17; it must be an integer from 0 to 16"),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens is 0; it should be greater than or equal to 1"),
        ("priority", HUGE, f"priority is {HUGE}; it should be less than"),
        ("cache_salt", 5, "cache_salt is 5; it should be a valid string"),
        ("stream", 1, "stream is 1; it should be a valid boolean"),
        ("stream_options", {}, "stream_options is given, but stream is not true"),
        ("user", 5, "user is 5; it should be a valid string"),
        ("suffix", "the end", "suffix is 'the end'; this server does not support it, only null or ''"),
        ("store", True, "store is True; this server does not support it, only null or False"),
        ("temprature", 1, "there is no field 'temprature'; did you mean 'temperature'?"),
        ("nonsense" * 100, 1, "there is no field 'nonsense"),
        ("{message}", 1, "there is no field '{message}'"),
    ],
)
@pytest.mark.usefixtures("strictly")
def test_a_field_is_refused_by_name(server: RunningServer, field: str, value: Any, message: str) -> None:
    error = error_of(server, COMPLETIONS, json.dumps({"prompt": "a", field: value}).encode())
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    if "contains token id" not in message:
        assert str(error["param"]).split("[")[0] == field


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "at least 1 item"),
        ({"messages": "hi"}, "messages is 'hi'; it should be a valid list"),
        ({"messages": ["hi"]}, "messages[0] is 'hi'; it should be"),
        ({"messages": [{"role": "poet", "content": "a"}]}, "messages[0].role is 'poet'; it should be 'system'"),
        ({"messages": [{"content": "a"}]}, "messages[0].role is missing"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is 3; it should be a valid string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]: the type is 'image_url'; this server takes parts of type 'text' only",
        ),
        ({"messages": [{"role": "user", "content": "a", "audio": {"id": "b"}}]}, "messages[0]: audio is {'id': 'b'}"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be an integer from 1"),
        ({"max_completion_tokens": HUGE}, "max_tokens is 1000"),
        ({"top_logprobs": 2}, "top_logprobs is given, but logprobs is not true"),
        ({"top_logprobs": 6, "logprobs": True}, "top_logprobs is 6; this server takes at most 5"),
        ({"logprobs": 2}, "logprobs is 2; it should be a valid boolean"),
        ({"functions": [{"name": "f"}]}, "functions is"),
        ({"modalities": ["text", "audio"]}, "modalities is"),
        ({"add_special_tokens": True}, "add_special_tokens is True; this server does not support it"),
        ({"reasoning_effort": 3}, "reasoning_effort is 3"),
        ({"chat_template": "{{ 1 }}"}, "this server takes only the model's own (--trust-request-chat-template)"),
        ({"chat_template_kwargs": {"tokenize": False}}, "has 'tokenize', which is not a variable of the template"),
        ({"chat_template_kwargs": {"messages": []}}, "has 'messages', which is not a variable of the template"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "they exclude each other"),
        (
            {"stream": True, "stream_options": {"include_usag": True}},
            "stream_options: there is no field 'include_usag'; did you mean",
        ),
    ],
)
@pytest.mark.usefixtures("strictly")
def test_a_chat_is_refused(server: RunningServer, fields: dict[str, Any], message: str) -> None:
    error = error_of(server, CHAT, json.dumps({"messages": HELLO, **fields}).encode())
    assert message in error["message"]


def test_the_client_raises_the_matching_error(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        server.client.completions.create(model="gpt-5", prompt="a")
    assert not_found.value.code == "model_not_found"
    assert not_found.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="1026 tokens") as too_long:
        server.client.chat.completions.create(model="stories", messages=[{"role": "user", "content": " a" * 1022}])
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="best_of cannot be combined with stream"):
        server.client.completions.create(model="stories", prompt="a", best_of=2, stream=True)
    with pytest.raises(openai.BadRequestError, match="best_of is 1; it must be at least n, which is 2"):
        server.client.completions.create(model="stories", prompt="a", best_of=1, n=2)


def test_an_unknown_endpoint_is_refused(server: RunningServer) -> None:
    assert error_of(server, "/v1/nothing", b"{}", 404)["message"] == "there is no /v1/nothing"
    assert "does not take POST; it takes GET" in error_of(server, "/v1/models", b"{}", 405)["message"]
    assert server.http.get(COMPLETIONS).headers["allow"] == "POST"
    error = error_of(server, COMPLETIONS, b'{"prompt": "a"}', 415, content_type="text/plain")
    assert "the content type is 'text/plain'; send JSON" in error["message"]


def test_null_means_absent(server: RunningServer) -> None:
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    nothing = dict.fromkeys(schemas["CompletionRequest"]["properties"]) | {"suffix": None}
    assert server.complete(**{**nothing, "prompt": "a", "max_tokens": 1})["usage"]["completion_tokens"] == 1
    nothing = dict.fromkeys(schemas["ChatRequest"]["properties"]) | {"tools": None, "functions": None}
    response = server.http.post(CHAT, json={**nothing, "messages": HELLO, "max_tokens": 1})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\x01\x02\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the start of a TLS handshake
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
        raw_request(COMPLETIONS, b'{"prompt": "a"}')[:-5],
    ],
)
def test_malformed_and_partial_requests_do_no_harm(server: RunningServer, garbage: bytes) -> None:
    with server.connection() as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    assert not answer or answer.startswith(b"HTTP/1.1 400")
    assert server.complete(prompt="a", max_tokens=1)
