"""`inflight batch`: results in order, and a job that goes on after it was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.batches.jobs import Echo, Jobs
from tests.command import Command
from tests.interrupts import heed_interrupts

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def request(custom_id: str, url: str = COMPLETION, **body: Any) -> dict[str, Any]:
    body = {"model": "any", "temperature": 0, "max_tokens": 8} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def write(path: Path, *requests: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in requests))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(path: Path) -> list[tuple[str, str]]:
    """The `custom_id` and the text of each result."""
    return [(line["custom_id"], line["response"]["body"]["choices"][0]["text"]) for line in read(path)]


def test_results_and_errors_come_in_order_and_are_not_overwritten(
    command: Command, refused: Command, tmp_path: Path
) -> None:
    requests = write(
        tmp_path / "requests.jsonl",
        request("b", prompt="Once upon a time"),
        request("a", prompt="Once", max_tokens=-1),
        request("c", CHAT, messages=[{"role": "user", "content": "A story."}]),
        request("d", prompt="Once upon a time"),
    )
    output, errors = tmp_path / "results.jsonl", tmp_path / "results.errors.jsonl"
    done = command("batch", requests, "-o", output)
    assert (done.returncode, done.stdout) == (0, "")
    assert "4/4" in done.stderr
    assert f"inflight: 1 of 4 requests failed: see '{errors}'" in done.stderr
    assert [line["custom_id"] for line in read(output)] == ["b", "c", "d"]
    assert read(output)[0]["response"]["body"]["model"] == "inflight-demo"
    assert [(line["custom_id"], line["response"]["status_code"]) for line in read(errors)] == [("a", 400)]
    assert {path.name for path in tmp_path.iterdir()} == {requests.name, output.name, errors.name}
    assert output.stat().st_mode == requests.stat().st_mode
    plain = command("generate", "Once upon a time", "--temperature", 0, "--max-tokens", 8)
    assert read(output)[0]["response"]["body"]["choices"][0]["text"] == plain.stdout.removesuffix("\n")
    again = refused("batch", requests, "-o", output)
    assert f"'{output}' exists; name another file, or add --overwrite" in again.stderr
    again = refused("batch", requests, "-o", tmp_path / "new.jsonl", "--errors", errors)
    assert f"'{errors}' exists" in again.stderr
    write(requests, request("b", prompt="Once upon a time"))
    assert command("batch", requests, "-o", output, "--overwrite", "--quiet").stderr == ""
    assert [line["custom_id"] for line in read(output)] == ["b"]
    assert not errors.exists(), "it was of the results that were replaced"


def test_a_place_for_results_that_is_none_is_refused(refused: Command, tmp_path: Path) -> None:
    requests = write(tmp_path / "requests.jsonl", request("a", prompt="Once"))
    for output in (tmp_path, tmp_path / "nowhere" / "results.jsonl"):
        assert "is a folder, or would be in one that is not there" in refused("batch", requests, "-o", output).stderr
    same = refused("batch", requests, "-o", tmp_path / "a", "--errors", tmp_path / "a")
    assert "results and errors cannot be the same file" in same.stderr
    assert list(tmp_path.iterdir()) == [requests]


@pytest.mark.parametrize(
    ("content", "sentences"),
    [
        ("{}\n" * 2, ["and nothing was answered", "line 1: ", "line 2: "]),
        (json.dumps(request("a")) + "\n" + json.dumps(request("a")), ["line 2: the custom_id 'a' is that of line 1"]),
        ("", ["the file has no requests"]),
        (None, ["there is no file"]),
    ],
)
def test_a_wrong_file_is_said_before_anything_is_loaded(
    refused: Command, tmp_path: Path, content: str | None, sentences: list[str]
) -> None:
    requests = tmp_path / "requests.jsonl"
    if content is not None:
        requests.write_text(content)
    done = refused("batch", requests, "-o", tmp_path / "results.jsonl")
    assert all(sentence in done.stderr for sentence in sentences), done.stderr
    assert list(tmp_path.iterdir()) == ([] if content is None else [requests])


def test_a_job_that_was_given_up_hands_over_what_is_answered(command: Command, tmp_path: Path) -> None:
    """As when the folder's copy of the requests was deleted."""
    requests, output = write(tmp_path / "requests.jsonl", request("a", prompt="x")), tmp_path / "results.jsonl"
    jobs = Jobs(tmp_path / "results.jsonl.job", time.time)
    job = jobs.create(requests.read_bytes(), metadata={"model": "None"})
    jobs.finish(Echo())
    with jobs.database.transaction() as connection:
        ended = msgspec.json.encode(replace(jobs.get(job), status="cancelled"))
        connection.execute("UPDATE batches SET status = 'cancelled', content = ?", (ended,))
    jobs.database.close()
    assert command("batch", requests, "-o", output).returncode == 0
    assert [line["response"]["body"]["echo"] for line in read(output)] == ["x"]
    assert {path.name for path in tmp_path.iterdir()} == {requests.name, output.name}


@pytest.mark.thorough
def test_a_killed_job_goes_on_with_the_same_requests_and_options(refused: Command, tmp_path: Path) -> None:
    many = [request(str(number), prompt=f"Once {number % 7}", max_tokens=40, ignore_eos=True) for number in range(200)]
    requests, output = write(tmp_path / "requests.jsonl", *many), tmp_path / "results.jsonl"
    arguments = [sys.executable, "-m", "inflight", "batch", str(requests), "-o", str(output), "--max-num-seqs", "4"]
    journal = tmp_path / "results.jsonl.job" / "batches.sqlite-wal"
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL, start_new_session=True)
    end, size = time.monotonic() + 300, 0
    while size < 100_000:  # it grows with each result
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
        size = journal.stat().st_size if journal.exists() else 0
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not output.exists()
    interrupted = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts)
    assert interrupted.stderr is not None
    assert interrupted.stderr.read(1)  # the bar: it is at work
    interrupted.send_signal(signal.SIGINT)
    said = interrupted.communicate(timeout=100)[1]
    assert "inflight: run the same command again to resume\n" in said
    assert said.endswith("inflight: interrupted\n")
    assert interrupted.returncode == 130
    other = refused("batch", requests, "-o", output, "--kv-cache-dtype", "int8")
    assert "this job began with kv_cache_dtype at its default; go on with that, or delete" in other.stderr
    content = requests.read_text()
    write(requests, request("new", prompt="x"))
    changed = refused("batch", requests, "-o", output)
    assert "has changed since this job began; restore it, or delete" in changed.stderr
    requests.write_text(content)
    again = subprocess.run(arguments, capture_output=True, text=True, timeout=150)
    assert again.returncode == 0, again.stderr
    results = texts(output)
    assert [custom_id for custom_id, _ in results] == [str(number) for number in range(200)]
    assert len({(int(custom_id) % 7, text) for custom_id, text in results}) == 7
    assert not journal.parent.exists()
