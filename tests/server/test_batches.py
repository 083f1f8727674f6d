"""Files and batch jobs over HTTP, with OpenAI's client: whole, wrong, cancelled, interrupted, and in the background."""

import json
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from starlette.types import ASGIApp

from inflight import AsyncLLM
from inflight.server.app import create_app
from inflight.server.operations.api_keys import ApiKeys
from inflight.server.serving.settings import ServerSettings
from tests.coroutines import run
from tests.server.operations.serving import client_of
from tests.server.serving import HELLO, RunningServer, read_until
from tests.stepper import Stepper

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
FINISHED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "jobs"


@pytest.fixture(scope="module")
def serving(folder: Path) -> Iterator[RunningServer]:
    with RunningServer(AsyncLLM(num_blocks=2000), batch_dir=str(folder), max_file_size=3_000_000) as server:
        yield server


def lines_of(requests: Sequence[tuple[str, dict[str, Any]]]) -> bytes:
    """A batch file, in which the `custom_id` is the number of the line."""
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, (url, body) in enumerate(requests)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def begin(client: openai.OpenAI, content: bytes, endpoint: Any = COMPLETION, **options: Any) -> Any:
    """Begin a job."""
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


def wait_until(client: openai.OpenAI, job: Any, *statuses: str, num_done: int = 0) -> Any:
    """Return the job once it has such a status, and so many answers."""
    end = time.monotonic() + 100
    while True:
        now = client.batches.retrieve(job.id)
        if now.status in statuses and now.request_counts.completed >= num_done:
            return now
        assert now.status not in FINISHED, now
        assert time.monotonic() < end, now
        time.sleep(0.01)


def finished(client: openai.OpenAI, job: Any) -> Any:
    return wait_until(client, job, *FINISHED)


def read(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    """The lines of a file."""
    return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def essence(body: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs each time."""
    return {name: value for name, value in body.items() if name in ("object", "choices", "output", "model")}


@pytest.mark.parametrize("url", [CHAT, COMPLETION])
def test_each_line_gets_what_it_would_get_alone(serving: RunningServer, url: str) -> None:
    prompt = {"messages": HELLO} if url == CHAT else {"prompt": "Once upon a time"}
    variants: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 5}, {"n": 2, "seed": 3}]
    bodies = [{**prompt, **variant, "max_tokens": number} for number in (3, 9) for variant in variants]
    bodies.insert(2, {**prompt, "temperature": -1})
    client = serving.client
    job = begin(client, lines_of([(url, body) for body in bodies]), url, metadata={"a": "b"})
    assert (job.status, job.object, job.metadata, job.endpoint) == ("validating", "batch", {"a": "b"}, url)
    now = finished(client, job)
    assert (now.status, now.request_counts.total, now.request_counts.completed) == ("completed", 7, 6)
    assert now.request_counts.failed == 1
    assert now.created_at <= now.in_progress_at <= now.finalizing_at <= now.completed_at < now.expires_at
    results, (error,) = read(client, now.output_file_id), read(client, now.error_file_id)
    assert [line["custom_id"] for line in results] == ["0", "1", "3", "4", "5", "6"]
    assert (error["custom_id"], error["response"]["status_code"]) == ("2", 400)
    assert error["response"]["body"]["error"]["param"] == "temperature"
    for line in results:
        alone = serving.http.post(url, json=bodies[int(line["custom_id"])]).json()
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        assert essence(line["response"]["body"]) == essence(alone)
    used = [line["response"]["body"]["usage"] for line in results]
    assert now.usage.output_tokens == sum(usage["completion_tokens"] for usage in used)
    assert now.usage.input_tokens == sum(usage["prompt_tokens"] for usage in used)


def test_responses_are_answered_too(serving: RunningServer) -> None:
    body = {"input": "A story.", "max_output_tokens": 4, "temperature": 0}
    now = finished(serving.client, begin(serving.client, lines_of([(RESPONSES, body)]), RESPONSES))
    (line,) = read(serving.client, now.output_file_id)
    assert line["response"]["body"]["object"] == "response"
    assert now.usage.output_tokens == 4


def test_a_file_that_is_wrong_answers_nothing(serving: RunningServer) -> None:
    good = (COMPLETION, {"prompt": "a", "max_tokens": 1})
    content = lines_of([good, (CHAT, {"messages": HELLO}), (COMPLETION, {"prompt": "a", "stream": True})]) + b"{\n"
    now = finished(serving.client, begin(serving.client, content + lines_of([good])))
    assert now.status == "failed"
    assert [(error.line, error.code) for error in now.errors.data] == [
        (2, "invalid_url"),
        (3, "invalid_request"),
        (4, "invalid_json_line"),
        (5, "duplicate_custom_id"),
    ]
    assert (now.output_file_id, now.request_counts.completed) == (None, 0)
    assert finished(serving.client, begin(serving.client, b"")).errors.data[0].code == "empty_file"


def test_files_and_jobs_are_listed_shown_and_deleted(serving: RunningServer) -> None:
    client = serving.client
    made = [client.files.create(file=(f"{name}.jsonl", b"x" * 10), purpose="batch") for name in "abc"]
    jobs = [client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1h") for file in made]
    for job in jobs:
        assert finished(client, job).status == "failed"
    assert [file.id for file in client.files.list()][:3] == [file.id for file in reversed(made)]
    assert [file.filename for file in client.files.list(order="asc", after=made[0].id)][:2] == ["b.jsonl", "c.jsonl"]
    assert [job.id for job in client.batches.list(limit=1)][:3] == [job.id for job in reversed(jobs)]
    page = client.batches.list(limit=2, after=jobs[-1].id)
    assert [job.id for job in page.data] == [jobs[1].id, jobs[0].id]
    for file in client.files.list(purpose="batch_output"):
        assert file.filename.endswith(("_output.jsonl", "_error.jsonl"))
    assert client.files.retrieve(made[0].id) == made[0]
    assert client.files.delete(made[0].id).deleted
    assert made[0].id not in [file.id for file in client.files.list()]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("GET", "/v1/files/nothing", None, 404, "there is no file 'nothing'"),
        ("GET", "/v1/files/nothing/content", None, 404, "there is no file 'nothing'"),
        ("DELETE", "/v1/files/..", None, 404, ""),
        ("GET", "/v1/batches/nothing", None, 404, "there is no batch job 'nothing'"),
        ("POST", "/v1/batches/nothing/cancel", None, 404, "there is no batch job 'nothing'"),
        ("GET", "/v1/batches?after=nothing", None, 400, "there is nothing with the id 'nothing' in this list"),
        ("GET", "/v1/batches?limit=0", None, 400, "limit"),
        ("GET", "/v1/files?order=up", None, 400, "order"),
        ("GET", "/v1/files?color=red", None, 400, "there is no parameter 'color'"),
        ("POST", "/v1/batches", {}, 400, "input_file_id is missing"),
        ("POST", "/v1/batches", {"endpoint": "/v1/embeddings"}, 400, "endpoint is '/v1/embeddings'; it must be one of"),
        ("POST", "/v1/batches", {"completion_window": "soon"}, 400, "a time such as '24h', '30m' or '7d'"),
        ("POST", "/v1/batches", {"output_expires_after": {"anchor": "now", "seconds": 1}}, 404, "no file 'nothing'"),
    ],
)
def test_what_is_not_there_or_wrong_is_said(
    serving: RunningServer, method: str, path: str, body: Any, status: int, said: str
) -> None:
    if body:
        body = {"input_file_id": "nothing", "endpoint": CHAT, "completion_window": "24h"} | body
    answer = serving.http.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]


def test_a_job_reads_only_files_that_were_uploaded_for_it(serving: RunningServer) -> None:
    now = finished(serving.client, begin(serving.client, lines_of([(COMPLETION, {"prompt": "a", "max_tokens": 1})])))
    with pytest.raises(openai.BadRequestError, match="is a file for 'batch_output'"):
        serving.client.batches.create(input_file_id=now.output_file_id, endpoint=CHAT, completion_window="24h")
    file = serving.client.files.create(file=b"x", purpose="batch")
    for kept in ({"anchor": "now", "seconds": 9}, {"anchor": "created_at", "seconds": 0}):
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", "output_expires_after": kept}
        assert "output_expires_after" in serving.http.post("/v1/batches", json=body).json()["error"]["message"]


# ------------------------------------------------------------------------------------- uploads


def test_a_file_arrives_byte_for_byte(serving: RunningServer) -> None:
    content = b"".join(bytes([number % 256]) * 7 + b"\r\n--" + b"-" * (number % 90) for number in range(40_000))
    file = serving.client.files.create(file=("ä.jsonl", content), purpose="batch")
    assert (file.bytes, file.filename) == (len(content), "ä.jsonl")
    assert serving.client.files.content(file.id).content == content


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        ({"files": {"file": b"x" * 3_000_001}, "data": {"purpose": "batch"}}, 413, "more than 3000000 bytes"),
        ({"files": {"file": b"x"}}, 400, "purpose is None; this server keeps files for 'batch' only"),
        ({"files": {"file": b"x"}, "data": {"purpose": "fine-tune"}}, 400, "purpose is 'fine-tune'"),
        ({"files": {"fill": b"x"}, "data": {"purpose": "batch"}}, 400, "there is no field 'fill'"),
        ({"files": {"other": (None, b"x")}, "data": {"purpose": "batch"}}, 400, "there is no field 'other'"),
        ({"files": {"purpose": (None, b"batch")}}, 400, "file is missing"),
        ({"files": [("file", b"x"), ("file", b"y")]}, 400, "more than one file"),
        ({"files": {"file": b"x"}, "data": {"purpose": "b" * 5000}}, 400, "purpose has more than 4096 bytes"),
        (
            {"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[anchor]": "created_at"}},
            400,
            "expires_after.seconds is 'None'",
        ),
        ({"json": {"purpose": "batch"}}, 415, "a file is sent as multipart/form-data"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, "cannot be read"),
    ],
)
def test_a_wrong_upload_leaves_nothing(
    serving: RunningServer, folder: Path, sent: dict[str, Any], status: int, said: str
) -> None:
    before = sorted((folder / "files").iterdir())
    answer = serving.http.post("/v1/files", **sent)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text
    assert sorted((folder / "files").iterdir()) == before


def test_an_upload_that_breaks_off_leaves_nothing(serving: RunningServer, folder: Path) -> None:
    before = sorted((folder / "files").iterdir())
    head = 'POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary="b"\r\n'
    part = '--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + "x" * 500_000
    whole = part + "\r\n--b"  # without the last boundary
    with serving.connection() as connection:
        connection.sendall(f"{head}Content-Length: {len(whole)}\r\n\r\n{whole}".encode())
        assert b"the form ends before its last boundary" in read_until(connection, b"boundary")
    with serving.connection() as connection:
        connection.sendall(f"{head}Content-Length: {len(part) + 10}\r\n\r\n{part}".encode())
        connection.shutdown(socket.SHUT_WR)
        read_until(connection, b"never")
    end = time.monotonic() + 60
    while sorted((folder / "files").iterdir()) != before:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_server_without_a_folder_says_so(server: RunningServer) -> None:
    for answer in (server.http.get("/v1/files"), server.http.get("/v1/batches/x"), server.http.post("/v1/files")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "batches_not_enabled")


# ------------------------------------------------------------------------------------- beside others, and over ends


@pytest.fixture
def stepper(monkeypatch: pytest.MonkeyPatch) -> Stepper:
    return Stepper(monkeypatch, num_blocks=1000, max_num_seqs=4)


def endless(number: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests that each take 20 steps."""
    bodies = [{"prompt": [5 + each % 20, 7], "max_tokens": 20, "ignore_eos": True} for each in range(number)]
    return [(COMPLETION, body) for body in bodies]


def test_a_job_rests_while_a_client_is_served(stepper: Stepper, tmp_path: Path) -> None:
    with RunningServer(stepper.llm, batch_dir=str(tmp_path / "jobs")) as server:
        begin(server.client, lines_of(endless(10)))
        stepper.wait_until_held()
        scheduler = stepper.engines[0].scheduler
        ran, inner = list[set[bool]](), stepper.run

        def see(plan: Any, masks: Any) -> Any:
            running = [scheduler.running(span.sequence_id) for span in plan.spans]
            ran.append({sequence.is_background for sequence in running})
            return inner(plan, masks)

        stepper.run = see  # type: ignore[method-assign]
        stepper.allow()
        server.complete(prompt=[9, 8, 7], max_tokens=5, ignore_eos=True)
        assert {False} in ran
        assert {True, False} not in ran, "no step is shared"


def test_a_job_goes_on_after_the_server_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content, options = lines_of(endless(30)), {"batch_dir": str(tmp_path / "jobs")}
    first = Stepper(monkeypatch, num_blocks=1000, max_num_seqs=4)
    with RunningServer(first.llm, **options) as server:
        job = begin(server.client, content)
        while server.client.batches.retrieve(job.id).request_counts.completed == 0:
            first.allow(5)
        first.wait_until_held()
        with pytest.raises(openai.ConflictError, match="is the input of a batch job that is not finished"):
            server.client.files.delete(job.input_file_id)
        with pytest.raises(ValueError, match="the folder for batch jobs cannot be used: another process works with"):
            create_app(first.llm, ServerSettings(**options))
        first.allow()
        server._server.should_exit = True
    second = Stepper(monkeypatch, num_blocks=1000, max_num_seqs=4)
    second.allow()
    with RunningServer(second.llm, **options) as server:
        now = finished(server.client, job)
        assert (now.status, now.request_counts.completed) == ("completed", 30)
        lines = read(server.client, now.output_file_id)
        assert [line["custom_id"] for line in lines] == [str(number) for number in range(30)]
        by_prompt: dict[int, set[str]] = {}
        for line in lines:
            text = json.dumps(line["response"]["body"]["choices"])
            by_prompt.setdefault(int(line["custom_id"]) % 20, set()).add(text)
        assert len(by_prompt) == 20


def test_a_cancelled_job_keeps_what_was_answered(stepper: Stepper, tmp_path: Path) -> None:
    with RunningServer(stepper.llm, batch_dir=str(tmp_path / "jobs")) as server:
        client = server.client
        job = begin(client, lines_of(endless(40)))
        while client.batches.retrieve(job.id).request_counts.completed == 0:
            stepper.allow(5)
        stepper.wait_until_held()
        cancelled = client.batches.cancel(job.id)
        assert cancelled.status == "cancelling"
        stepper.allow()
        now = finished(client, job)
        assert (now.status, now.cancelled_at is not None) == ("cancelled", True)
        done, given_up = read(client, now.output_file_id), read(client, now.error_file_id)
        assert len(done) == now.request_counts.completed > 0
        assert len(done) + len(given_up) == 40
        assert {line["error"]["code"] for line in given_up} == {"batch_cancelled"}
        assert client.batches.cancel(job.id).status == "cancelled"
        short = finished(client, begin(client, lines_of(endless(1))))
        with pytest.raises(openai.ConflictError, match="is completed; only a job that is not finished"):
            client.batches.cancel(short.id)


def test_what_a_key_stored_belongs_to_it(stepper: Stepper, tmp_path: Path) -> None:
    stepper.allow()
    app: ASGIApp = create_app(stepper.llm, ServerSettings(batch_dir=str(tmp_path / "jobs")))
    app = ApiKeys(["one", "two"]).middleware(app)

    async def check() -> None:
        async with client_of(app) as client:

            async def ask(key: str, method: str, path: str, **options: Any) -> tuple[int, Any]:
                headers = {"Authorization": f"Bearer {key}"}
                async with client.request(method, path, headers=headers, **options) as answer:
                    return answer.status, await answer.json()

            form = httpx2.Request("POST", "http://x", files={"file": lines_of(endless(1))}, data={"purpose": "batch"})
            body, kind = form.read(), form.headers["content-type"]
            headers = {"Authorization": "Bearer one", "Content-Type": kind}
            async with client.post("/v1/files", data=body, headers=headers) as answer:
                file = await answer.json()
            begun = {"input_file_id": file["id"], "endpoint": COMPLETION, "completion_window": "24h"}
            assert (await ask("two", "POST", "/v1/batches", json=begun))[0] == 404
            status, job = await ask("one", "POST", "/v1/batches", json=begun)
            assert status == 200
            for path, listed in ((f"/v1/files/{file['id']}", "/v1/files"), (f"/v1/batches/{job['id']}", "/v1/batches")):
                assert (await ask("one", "GET", path))[0] == 200
                assert (await ask("two", "GET", path))[0] == 404
                assert len((await ask("one", "GET", listed))[1]["data"]) >= 1
                assert (await ask("two", "GET", listed))[1]["data"] == []
            assert (await ask("two", "GET", f"/v1/files/{file['id']}/content"))[0] == 404
            assert (await ask("two", "DELETE", f"/v1/files/{file['id']}"))[0] == 404
            assert (await ask("two", "POST", f"/v1/batches/{job['id']}/cancel"))[0] == 404

    run(check())
