"""Which lines are requests, and in which order they are worked on."""

import io
import json
import random
from codecs import BOM_UTF8
from itertools import pairwise
from typing import Any

import pytest

from inflight.batches import request_lines
from inflight.batches.batch import LineError
from inflight.batches.request_lines import RequestLine, read_lines, request_of

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def line(**changes: Any) -> bytes:
    request = {"custom_id": "a", "method": "POST", "url": COMPLETION, "body": {"prompt": "x"}} | changes
    return json.dumps({name: value for name, value in request.items() if value is not None}).encode()


def read(content: bytes) -> list[RequestLine | LineError]:
    return list(read_lines(io.BytesIO(content), (CHAT, COMPLETION)))


def test_lines_are_found_again_by_their_place() -> None:
    content = BOM_UTF8 + b"\n" + line(custom_id="ä") + b"\r\n\n  \n" + line(custom_id="b", url=CHAT, body={"n": [1]})
    first, second = read(content)
    assert isinstance(first, RequestLine)
    assert isinstance(second, RequestLine)
    assert [(each.number, each.custom_id) for each in (first, second)] == [(2, "ä"), (5, "b")]
    for each, expected in ((first, (COMPLETION, {"prompt": "x"})), (second, (CHAT, {"n": [1]}))):
        url, body = request_of(content[each.offset : each.offset + each.num_bytes])
        assert (url, json.loads(body)) == expected


def test_a_byte_order_mark_is_no_part_of_the_first_line() -> None:
    content = BOM_UTF8 + line(custom_id="a") + b"\n" + line(custom_id="b")
    for each, name in zip(read(content), "ab", strict=True):
        assert isinstance(each, RequestLine)
        assert each.custom_id == name
        assert request_of(content[each.offset : each.offset + each.num_bytes])[0] == COMPLETION


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"{", "invalid_json_line", "it is not JSON"),
        (b"\xff\xfe", "invalid_json_line", "it is not JSON"),
        (b'{"body": ' + b"[" * 100_000, "invalid_json_line", "it is not JSON"),
        (b"[]", "invalid_request", "a request has a custom_id"),
        (line(custom_id=None), "invalid_request", "custom_id"),
        (line(custom_id=3), "invalid_request", "custom_id"),
        (line(custom_id=""), "invalid_request", "length >= 1 - at `$.custom_id`"),
        (line(custom_id="x" * 513), "invalid_request", "length <= 512 - at `$.custom_id`"),
        (line(body=None), "invalid_request", "body"),
        (line(body=[]), "invalid_request", "the body is wrong"),
        (line(priority=3), "invalid_request", "priority"),
        (line(method="GET"), "invalid_method", "it must be POST"),
        (line(url="/v1/embeddings"), "invalid_url", "it must be '/v1/chat/completions' or '/v1/completions'"),
        (line(body={"prompt": "x", "stream": True}), "invalid_request", "cannot stream"),
    ],
)
def test_a_wrong_line_is_named(content: bytes, code: str, message: str) -> None:
    good, wrong, better = read(line() + b"\n" + content + b"\n" + line())
    assert isinstance(good, RequestLine)
    assert isinstance(better, RequestLine)
    assert isinstance(wrong, LineError)
    assert (wrong.code, wrong.line) == (code, 2)
    assert message in wrong.message


def test_a_line_without_an_end_is_not_read_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_lines, "MAX_LINE_BYTES", 100)
    good, wrong = read(line() + b"\n" + b"x" * 10_000 + b"\n" + line())
    assert isinstance(good, RequestLine)
    assert wrong == LineError("line_too_long", "it has more than 100 bytes", 2)


def test_requests_for_the_same_model_are_neighbours() -> None:
    models = ["a", "b", "a", None, "b", "c", None, "a"]
    bodies = [
        {"prompt": str(number)} | ({} if model is None else {"model": model}) for number, model in enumerate(models)
    ]
    lines = read(b"\n".join(line(custom_id=str(i), body=body) for i, body in enumerate(bodies)))
    ordered = sorted((each for each in lines if isinstance(each, RequestLine)), key=lambda each: each.prefix)
    in_order = [models[int(each.custom_id)] for each in ordered]
    assert sum(before != after for before, after in pairwise(in_order)) == len(set(models)) - 1


def test_requests_that_begin_alike_are_neighbours() -> None:
    rng = random.Random(1)
    systems = ["".join(rng.choices("abcdef ", k=length)) for length in (70, 600, 600, 5000)]
    bodies = []
    for number in range(40):
        messages = [{"role": "system", "content": rng.choice(systems)}, {"role": "user", "content": str(number)}]
        body: dict[str, Any] = {"temperature": rng.random(), "messages": messages}
        bodies.append(dict(rng.sample(sorted(body.items()), 2)))
    lines = read(b"\n".join(line(custom_id=str(i), url=CHAT, body=body) for i, body in enumerate(bodies)))
    ordered = sorted((each for each in lines if isinstance(each, RequestLine)), key=lambda each: each.prefix)
    texts = [bodies[int(each.custom_id)]["messages"][0]["content"] for each in ordered]
    changes = sum(before != after for before, after in pairwise(texts))
    assert len(texts) == 40
    assert changes == len(set(texts)) - 1
