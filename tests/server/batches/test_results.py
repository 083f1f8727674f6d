"""A job's results: each line gets its output when run alone, in the order of the lines; errors are separate."""

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from inflight.server.operations.metrics import BatchMetrics
from tests.server.batches.jobs import CHAT, COMPLETION, RESPONSES, begin, content_of, finished, line, read
from tests.server.serving import HELLO, RunningServer

VARYING = ("id", "created", "created_at", "completed_at", "usage")
"""Fields of an answer that differ each time, or with what the server has in its cache."""

GREEDY, SEEDED = {"temperature": 0}, {"temperature": 1.0, "seed": 11}


def constant(value: Any) -> Any:
    """An answer without the fields that vary."""
    if isinstance(value, dict):
        return {name: constant(each) for name, each in value.items() if name not in VARYING}
    return [constant(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("url", "bodies"),
    [
        (
            CHAT,
            [
                {"messages": HELLO, "max_tokens": 9, **GREEDY},
                {"messages": HELLO, "max_tokens": 7, "n": 2, **SEEDED},
                {"messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": 2, **GREEDY},
                {"messages": HELLO, "response_format": {"type": "json_object"}, "max_tokens": 12, **SEEDED},
            ],
        ),
        (
            COMPLETION,
            [
                {"prompt": "Once upon a time", "max_tokens": 9, **GREEDY},
                {"prompt": ["Lily", "Tom"], "max_tokens": 5, **SEEDED},
                {"prompt": "Once upon", "max_tokens": 12, "stop": " a", "stream": False, **GREEDY},
                {"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 1, "echo": True, **SEEDED},
            ],
        ),
        (
            RESPONSES,
            [
                {"input": "Tell me a story.", "max_output_tokens": 9, **GREEDY},
                {"input": HELLO, "max_output_tokens": 6, **GREEDY},
                {"input": "A fox.", "instructions": "Be brief.", "max_output_tokens": 4, **GREEDY},
            ],
        ),
    ],
)
def test_each_line_gets_what_it_would_get_alone(
    jobs_server: RunningServer, url: str, bodies: list[dict[str, Any]]
) -> None:
    client = jobs_server.client
    by_id = {f"{number * 7 % 10}-of-{url}": body for number, body in enumerate(bodies)}
    refused = {"too cold": bodies[0] | {"temperature": -1}, "unknown model": bodies[0] | {"model": "gpt-9"}}
    lines = [line(custom_id, url, **body) for custom_id, body in (by_id | refused).items()]
    lines.insert(1, lines.pop(-2))  # an error among results
    job = begin(client, content_of(lines), url, metadata={"of": "tests"})
    assert (job.object, job.status, job.endpoint) == ("batch", "validating", url)
    now = finished(client, job)
    counts = now.request_counts
    assert (now.status, counts.total, counts.completed) == ("completed", len(lines), len(bodies))
    assert (counts.failed, now.errors, now.metadata) == (2, None, {"of": "tests"})
    assert job.created_at <= now.in_progress_at <= now.finalizing_at <= now.completed_at < now.expires_at

    results, errors = read(client, now.output_file_id), read(client, now.error_file_id)
    assert [each["custom_id"] for each in results] == list(by_id)
    for each in results:
        assert each.keys() == {"id", "custom_id", "response", "error"}
        assert (each["response"]["status_code"], each["error"]) == (200, None)
        alone = jobs_server.http.post(url, json=by_id[each["custom_id"]])
        assert alone.status_code == 200
        assert constant(each["response"]["body"]) == constant(alone.json())
    assert [each["custom_id"] for each in errors] == list(refused)
    for each, status in zip(errors, (400, 404), strict=True):
        alone = jobs_server.http.post(url, json=refused[each["custom_id"]])
        assert (each["response"]["status_code"], alone.status_code, each["error"]) == (status, status, None)
        assert each["response"]["body"] == alone.json()
    assert len({each["id"] for each in results + errors}) == len(lines)

    used = [each["response"]["body"]["usage"] for each in results]
    names = ("input_tokens", "output_tokens") if url == RESPONSES else ("prompt_tokens", "completion_tokens")
    num_in, num_out = (sum(usage[name] for usage in used) for name in names)
    assert (now.usage.input_tokens, now.usage.output_tokens, now.usage.total_tokens) == (
        num_in,
        num_out,
        num_in + num_out,
    )
    files = [client.files.retrieve(file_id) for file_id in (now.output_file_id, now.error_file_id)]
    assert [(file.purpose, file.filename) for file in files] == [
        ("batch_output", f"{job.id}_output.jsonl"),
        ("batch_output", f"{job.id}_error.jsonl"),
    ]


def test_results_come_in_the_order_of_lines_whatever_was_answered_first(jobs_server: RunningServer) -> None:
    beginnings = ("Once " * 30, "Tom " * 30, "A")  # those that begin alike are answered together
    lines = [
        line(str(number * 7919 % 101), prompt=beginnings[number % 3], max_tokens=1 + number * 5 % 17, ignore_eos=True)
        for number in range(60)
    ]
    now = finished(jobs_server.client, begin(jobs_server.client, content_of(lines)))
    results = read(jobs_server.client, now.output_file_id)
    assert [each["custom_id"] for each in results] == [each["custom_id"] for each in lines]
    for asked, each in zip(lines, results, strict=True):
        assert each["response"]["body"]["usage"]["completion_tokens"] == asked["body"]["max_tokens"]
    assert now.error_file_id is None


def test_a_custom_id_may_be_any_text(jobs_server: RunningServer) -> None:
    custom_ids = [" ", "ä\u2028\u0085", '"\\\n', "\0", "\0\0", "a\0b", "a", "A", "x" * 512, "😀"]
    lines = [line(each, prompt="a", max_tokens=1) for each in custom_ids]
    now = finished(jobs_server.client, begin(jobs_server.client, content_of(lines)))
    assert [each["custom_id"] for each in read(jobs_server.client, now.output_file_id)] == custom_ids


def test_empty_lines_and_other_ends_of_lines_do_not_matter(jobs_server: RunningServer) -> None:
    one, two = (json.dumps(line(each, prompt="a", max_tokens=1)).encode() for each in "ab")
    now = finished(jobs_server.client, begin(jobs_server.client, b"\r\n\n" + one + b"\r\n \n\t" + two))
    assert [each["custom_id"] for each in read(jobs_server.client, now.output_file_id)] == ["a", "b"]
    assert now.request_counts.total == 2


def test_a_job_of_refused_lines_only_has_no_results(jobs_server: RunningServer) -> None:
    now = finished(jobs_server.client, begin(jobs_server.client, content_of([line("a", prompt="a", max_tokens=-1)])))
    assert (now.status, now.output_file_id, now.request_counts.failed) == ("completed", None, 1)
    assert now.usage.total_tokens == 0
    (error,) = read(jobs_server.client, now.error_file_id)
    assert error["response"]["status_code"] == 400


def test_the_operator_is_told_how_many_are_answered_and_left(jobs_server: RunningServer) -> None:
    lines = [line(str(number), prompt="a", max_tokens=-1 if number == 2 else 1) for number in range(5)]
    now = finished(jobs_server.client, begin(jobs_server.client, content_of(lines)))
    registry, left, answered = CollectorRegistry(), [], []
    metrics = BatchMetrics("tiny", registry)
    for batch in jobs_server.observer.batches:
        if batch.id == now.id:
            metrics.update(batch)
            left.append(registry.get_sample_value("inflight:batch_requests_left", {"model_name": "tiny"}))
    for outcome in ("completed", "failed"):
        labels = {"model_name": "tiny", "outcome": outcome}
        answered.append(registry.get_sample_value("inflight:batch_requests_total", labels))
    assert answered == [4, 1]
    assert left[0] == left[-1] == 0
    assert left[1:] == sorted(left[1:], reverse=True)
    assert left[1] == 5


GOOD = line("good", prompt="a", max_tokens=1)


@pytest.mark.parametrize(
    ("content", "errors"),
    [
        (content_of([GOOD, line("chat", CHAT, messages=HELLO)]), [(2, "invalid_url")]),
        (content_of([line("x", "/v1/embeddings", input="a")]), [(1, "invalid_url")]),
        (content_of([GOOD, line("b", prompt="a"), GOOD]), [(3, "duplicate_custom_id")]),
        (b'{"custom_id": \n\n' + content_of([GOOD]) + b"x", [(1, "invalid_json_line"), (4, "invalid_json_line")]),
        (content_of([GOOD, line("b", prompt="a", stream=True)]), [(2, "invalid_request")]),
        (content_of([line("b", prompt="a", stream="yes")]), [(1, "invalid_request")]),
        (content_of([GOOD | {"method": "GET"}]), [(1, "invalid_method")]),
        (content_of([GOOD | {"body": []}]), [(1, "invalid_request")]),
        (content_of([GOOD | {"custom_id": 3}]), [(1, "invalid_request")]),
        (content_of([GOOD | {"priority": 3}]), [(1, "invalid_request")]),
        (b"[1]\nnull\n", [(1, "invalid_request"), (2, "invalid_request")]),
        (b'{"custom_id": "\\ud800"}\n"\xff"\n', [(1, "invalid_json_line"), (2, "invalid_request")]),
        (b"[" * 200_000 + b"\n" + b'{"body":' + b"[" * 200_000, [(1, "invalid_request"), (2, "invalid_json_line")]),
        (b"", [(None, "empty_file")]),
        (b"\n \r\n\n", [(None, "empty_file")]),
    ],
)
def test_a_file_with_a_wrong_line_is_refused_as_a_whole(
    jobs_server: RunningServer, content: bytes, errors: list[tuple[int | None, str]]
) -> None:
    client = jobs_server.client
    now = finished(client, begin(client, content))
    assert (now.status, now.failed_at is not None, now.in_progress_at) == ("failed", True, None)
    assert (now.errors.object, [(each.line, each.code) for each in now.errors.data]) == ("list", errors)
    assert all(each.message for each in now.errors.data)
    assert (now.output_file_id, now.error_file_id, now.request_counts.completed) == (None, None, 0)


def test_only_the_first_errors_of_a_wrong_file_are_listed(jobs_server: RunningServer) -> None:
    now = finished(jobs_server.client, begin(jobs_server.client, b"{}\n" * 10_000))
    assert [each.line for each in now.errors.data] == list(range(1, 101))
