"""A file arrives byte for byte, or leaves nothing."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from inflight.batches.files import NewFile
from inflight.server.batches.files_endpoint import receive_form
from inflight.server.wire.api_errors import ApiError
from tests.coroutines import run
from tests.server.batches.conftest import MAX_FILE_SIZE
from tests.server.batches.jobs import names_in, upload, wait_for
from tests.server.serving import RunningServer, read_until


def like_a_form(boundary: str) -> bytes:
    """Several MB that look like the form around them, but for its boundary."""
    draw = random.Random(4)
    pieces = [b"\r", b"\n", b"\r\n", b"\r\n--", b"--", b"\r\n\r\n--", b"\0", bytes(range(256)), b"x" * 997]
    pieces += [f"\r\n--{boundary[:end]}".encode() for end in range(1, len(boundary))]
    return b"".join(draw.choices(pieces, k=50_000))


def post(server: RunningServer, boundary: str, content: bytes, end: str = "--\r\n") -> Any:
    """Upload a file with this boundary, and what follows its last one."""
    disposition = 'Content-Disposition: form-data; name="file"; filename="a \u00e4.jsonl"'
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{boundary}\r\n{disposition}'
    )
    body = f"{head}\r\n\r\n".encode() + content + f"\r\n--{boundary}{end}".encode()
    kind = f"multipart/form-data; boundary={boundary}"
    return server.http.post("/v1/files", content=body, headers={"Content-Type": kind})


def test_a_file_of_several_megabytes_arrives_byte_for_byte(jobs_server: RunningServer) -> None:
    boundary = "a-boundary-of-some-length"
    content = like_a_form(boundary)
    assert 2_000_000 < len(content) < MAX_FILE_SIZE
    answer = post(jobs_server, boundary, content)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["bytes"], answer.json()["filename"]) == (len(content), "a ä.jsonl")
    assert jobs_server.client.files.content(answer.json()["id"]).content == content


def test_the_end_of_a_form_may_be_at_any_place(jobs_server: RunningServer) -> None:
    for content in (b"", b"\r\n", b"--", b"\r\n--b", b"\r\n--boundar", b"\r\n--boundar\r\n--boundar\r"):
        answer = post(jobs_server, "boundary", content)
        assert jobs_server.client.files.content(answer.json()["id"]).content == content


def test_a_file_of_exactly_the_largest_size_is_taken(jobs_server: RunningServer) -> None:
    file = upload(jobs_server.client, b"x" * MAX_FILE_SIZE)
    assert file.bytes == MAX_FILE_SIZE
    jobs_server.client.files.delete(file.id)


@pytest.mark.parametrize("num_bytes", [MAX_FILE_SIZE + 1, 8 * MAX_FILE_SIZE])
def test_a_file_that_is_too_large_is_a_413(jobs_server: RunningServer, folder: Path, num_bytes: int) -> None:
    before = names_in(folder)
    with pytest.raises(openai.APIStatusError, match=f"the file has more than {MAX_FILE_SIZE} bytes") as refused:
        upload(jobs_server.client, b"x" * num_bytes)
    assert (refused.value.status_code, refused.value.code) == (413, "file_too_large")
    wait_for(lambda: names_in(folder) == before)


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        ({"json": {"purpose": "batch"}}, 415, "a file is sent as multipart/form-data"),
        ({"data": {"purpose": "batch"}}, 415, "the content type is 'application/x-www-form-urlencoded'"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 415, "a file is sent as multipart/"),
        ({"content": b"x"}, 415, "the content type is ''"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, "cannot be read"),
        ({"content": b"", "headers": {"Content-Type": "multipart/form-data; boundary=b"}}, 400, "the form ends before"),
        ({"files": {"file": b"x"}}, 400, "purpose is None; this server keeps files for 'batch' only"),
        ({"files": {"file": b"x"}, "data": {"purpose": "fine-tune"}}, 400, "purpose is 'fine-tune'"),
        ({"files": {"purpose": (None, b"batch")}}, 400, "file is missing"),
        ({"files": [("file", b"x"), ("file", b"y")], "data": {"purpose": "batch"}}, 400, "more than one file"),
        ({"files": {"file": b"x"}, "data": {"purpose": "batch", "color": "red"}}, 400, "there is no field 'color'"),
        ({"files": {"file": b"x", "other": b"y"}, "data": {"purpose": "batch"}}, 400, "there is no field 'other'"),
        ({"files": {"file": b"x"}, "data": {"purpose": "b" * 5000}}, 400, "purpose has more than 4096 bytes"),
        ({"files": {"file": b"x"}, "data": {str(each): "" for each in range(17)}}, 400, "more than 16 fields"),
        (
            {"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[anchor]": "now"}},
            400,
            "expires_after.anchor is 'now'",
        ),
        (
            {"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[anchor]": "created_at"}},
            400,
            "expires_after.seconds is 'None'",
        ),
    ],
)
def test_a_wrong_form_is_refused_and_leaves_no_file(
    jobs_server: RunningServer, folder: Path, sent: dict[str, Any], status: int, said: str
) -> None:
    before = names_in(folder)
    answer = jobs_server.http.post("/v1/files", **sent)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text
    wait_for(lambda: names_in(folder) == before)


def test_a_file_may_be_kept_for_a_time_only(jobs_server: RunningServer) -> None:
    kept: Any = {"anchor": "created_at", "seconds": 3600}
    file = jobs_server.client.files.create(file=b"x", purpose="batch", expires_after=kept)
    assert file.expires_at == file.created_at + 3600
    assert upload(jobs_server.client, b"x").expires_at is None


@pytest.mark.parametrize("end", ["", "-", "\r\n"])
def test_a_form_without_its_last_boundary_leaves_no_file(jobs_server: RunningServer, folder: Path, end: str) -> None:
    before = names_in(folder)
    answer = post(jobs_server, "boundary", b"x" * 100_000, end)
    assert (answer.status_code, "the form ends before its last boundary" in answer.text) == (400, True), answer.text
    assert names_in(folder) == before


@pytest.mark.parametrize("is_abrupt", [False, True])
def test_an_upload_that_breaks_off_leaves_no_file(jobs_server: RunningServer, folder: Path, is_abrupt: bool) -> None:
    before = names_in(folder)
    head = "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    part = '--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + "x" * 500_000
    with jobs_server.connection() as connection:
        connection.sendall(f"{head}Content-Length: {len(part) + 10}\r\n\r\n{part}".encode())
        wait_for(lambda: len(names_in(folder)) > len(before))
        if is_abrupt:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closing resets it
        else:
            connection.shutdown(socket.SHUT_WR)
            read_until(connection, b"never")
    wait_for(lambda: names_in(folder) == before)
    assert upload(jobs_server.client, b"x").bytes == 1


def test_a_client_that_falls_silent_is_given_up_and_a_slow_disk_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    monkeypatch.setattr("inflight.server.batches.files_endpoint.SECONDS_OF_SILENCE", 0.0)  # any disk is slower

    async def receive(*chunks: bytes, then_silent: bool) -> None:
        async def sent() -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk
            if then_silent:
                await asyncio.Event().wait()

        new = NewFile(tmp_path / "new")
        try:
            await receive_form("multipart/form-data; boundary=b", sent(), new, "file", 100)
            assert new.num_bytes == 6
        finally:
            new.discard()

    run(receive(head + b"abc", b"def", b"\r\n--b--\r\n", then_silent=False))
    with pytest.raises(ApiError, match="nothing of the file came for 0 seconds") as given_up:
        run(receive(head + b"abc", then_silent=True))
    assert given_up.value.status == 408
