"""Files and jobs are listed a page at a time, shown and deleted; what is not there is a 404 in OpenAI's envelope."""

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.batches.jobs import CHAT, begin, content_of, finished, line, names_in, upload
from tests.server.serving import RunningServer
from tests.stepper import Stepper


def test_files_are_listed_a_page_at_a_time_in_either_order(jobs_server: RunningServer) -> None:
    client = jobs_server.client
    made = [upload(client, b"x" * size, f"{size}.jsonl") for size in range(5)]
    assert [(file.bytes, file.filename, file.purpose, file.status) for file in made] == [
        (size, f"{size}.jsonl", "batch", "processed") for size in range(5)
    ]
    newest = [file.id for file in reversed(made)]
    assert [file.id for file in client.files.list().data][:5] == newest
    assert [file.id for file in client.files.list(order="asc").data][-5:] == newest[::-1]
    page = client.files.list(limit=2, after=newest[0])
    assert [file.id for file in page.data] == newest[1:3]
    assert page.has_more
    assert [file.id for file in page.get_next_page().data] == newest[3:5]
    last = client.files.list(order="asc", after=newest[1])
    assert ([file.id for file in last.data], last.has_more) == ([newest[0]], False)
    assert client.files.list(order="asc", after=newest[0]).data == []
    assert [file.id for file in client.files.list(limit=1)][:5] == newest, "the client turns the pages"
    shown = jobs_server.http.get("/v1/files", params={"limit": 2}).json()
    assert (shown["object"], shown["first_id"], shown["last_id"]) == ("list", newest[0], newest[1])


def test_files_are_listed_by_purpose(jobs_server: RunningServer) -> None:
    client = jobs_server.client
    now = finished(client, begin(client, content_of([line("a", prompt="a", max_tokens=1)])))
    assert now.output_file_id in [file.id for file in client.files.list(purpose="batch_output")]
    assert {file.purpose for file in client.files.list(purpose="batch_output")} == {"batch_output"}
    assert now.input_file_id in [file.id for file in client.files.list(purpose="batch")]
    assert {file.purpose for file in client.files.list(purpose="batch")} == {"batch"}
    assert client.files.list(purpose="fine-tune").data == []


def test_jobs_are_listed_a_page_at_a_time(jobs_server: RunningServer) -> None:
    client = jobs_server.client
    jobs = [finished(client, begin(client, b"", metadata={"place": str(place)})) for place in range(4)]
    newest = [job.id for job in reversed(jobs)]
    page = client.batches.list(limit=3)
    assert ([job.id for job in page.data], page.has_more) == (newest[:3], True)
    assert page.get_next_page().data[0] == jobs[0]
    assert [job.metadata["place"] for job in client.batches.list(limit=2, after=newest[0]).data] == ["2", "1"]
    assert [job.id for job in client.batches.list(limit=1)][:4] == newest


@pytest.mark.parametrize(
    ("method", "path", "param", "code"),
    [
        ("GET", "/v1/files/file-none", "file_id", "file_not_found"),
        ("GET", "/v1/files/file-none/content", "file_id", "file_not_found"),
        ("DELETE", "/v1/files/file-none", "file_id", "file_not_found"),
        ("GET", "/v1/files/batches.sqlite/content", "file_id", "file_not_found"),
        ("GET", "/v1/files/..%2Fbatches.sqlite/content", None, "not_found"),
        ("GET", "/v1/batches/batch_none", "batch_id", "batch_not_found"),
        ("POST", "/v1/batches/batch_none/cancel", "batch_id", "batch_not_found"),
    ],
)
def test_what_is_not_there_is_a_404(
    jobs_server: RunningServer, method: str, path: str, param: str | None, code: str
) -> None:
    answer = jobs_server.http.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (404, param, code)
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


def test_the_client_library_understands_a_404(jobs_server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no file 'file-x'"):
        jobs_server.client.files.content("file-x")
    with pytest.raises(openai.NotFoundError, match="there is no batch job 'batch_x'"):
        jobs_server.client.batches.retrieve("batch_x")
    with pytest.raises(openai.NotFoundError, match="there is no file 'file-x'") as refused:
        jobs_server.client.batches.create(input_file_id="file-x", endpoint=CHAT, completion_window="24h")
    assert refused.value.param == "input_file_id"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/files?after=file-x", "there is nothing with the id 'file-x' in this list"),
        ("/v1/files?limit=0", "limit"),
        ("/v1/files?limit=10001", "limit"),
        ("/v1/files?order=up", "order"),
        ("/v1/files?color=red", "there is no parameter 'color'"),
        ("/v1/batches?after=batch_x", "there is nothing with the id 'batch_x' in this list"),
        ("/v1/batches?limit=101", "limit"),
        ("/v1/batches?order=asc", "there is no parameter 'order'"),
    ],
)
def test_a_list_that_cannot_be_given_is_refused(jobs_server: RunningServer, path: str, said: str) -> None:
    answer = jobs_server.http.get(path)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": None}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "999d"}, "completion_window"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "now", "seconds": 60}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 0}}, "output_expires_after"),
    ],
)
def test_a_job_that_cannot_be_is_refused(jobs_server: RunningServer, changed: dict[str, Any], param: str) -> None:
    file = upload(jobs_server.client, b"x")
    newest = jobs_server.client.batches.list(limit=1).data
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | changed
    answer = jobs_server.http.post("/v1/batches", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert jobs_server.client.batches.list(limit=1).data == newest


def test_a_job_does_not_read_the_results_of_another(jobs_server: RunningServer) -> None:
    client = jobs_server.client
    now = finished(client, begin(client, content_of([line("a", prompt="a", max_tokens=1)])))
    with pytest.raises(openai.BadRequestError, match="is a file for 'batch_output'; a job reads a file for 'batch'"):
        client.batches.create(input_file_id=now.output_file_id, endpoint=CHAT, completion_window="24h")


def test_a_deleted_file_is_gone_from_the_disk_too(jobs_server: RunningServer, folder: Path) -> None:
    client = jobs_server.client
    now = finished(client, begin(client, content_of([line("a", prompt="a", max_tokens=1)])))
    for file_id in (now.input_file_id, now.output_file_id):
        assert file_id in names_in(folder)
        deleted = client.files.delete(file_id)
        assert (deleted.id, deleted.object, deleted.deleted) == (file_id, "file", True)
        assert file_id not in names_in(folder)
        assert file_id not in [file.id for file in client.files.list()]
        for gone in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                gone(file_id)
    assert client.batches.retrieve(now.id) == now


def test_a_server_without_a_folder_has_neither_files_nor_jobs(stepper: Stepper) -> None:
    with RunningServer(stepper.llm) as server:
        for method, path in (
            ("GET", "/v1/files"),
            ("POST", "/v1/files"),
            ("GET", "/v1/files/x/content"),
            ("GET", "/v1/batches"),
            ("GET", "/v1/batches/x"),
            ("POST", "/v1/batches/x/cancel"),
        ):
            answer = server.http.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "batches_not_enabled")
        with pytest.raises(openai.NotFoundError, match="its operator can start it with --batch-dir"):
            upload(server.client, b"x")
        body = {"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h"}
        assert server.http.post("/v1/batches", json=body).json()["error"]["code"] == "batches_not_enabled"
