"""Batch jobs over HTTP for tests: files of requests, jobs, and waiting for them."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import openai

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
FINISHED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str = COMPLETION, **body: Any) -> dict[str, Any]:
    """A line of a batch file."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def content_of(lines: Iterable[dict[str, Any]]) -> bytes:
    """A batch file."""
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


def long_lines(number: int) -> list[dict[str, Any]]:
    """Lines that each take 20 steps of a tiny model; their prompts differ."""
    options = {"max_tokens": 20, "ignore_eos": True, "temperature": 0}
    return [line(f"line {each}", prompt=[5 + each, 7], **options) for each in range(number)]


def upload(client: openai.OpenAI, content: bytes, name: str = "requests.jsonl") -> Any:
    """Store a file for a job."""
    return client.files.create(file=(name, content), purpose="batch")


def begin(client: openai.OpenAI, content: bytes, endpoint: Any = COMPLETION, **options: Any) -> Any:
    """Store a file and begin a job with it."""
    file = upload(client, content)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options)


def wait_for(is_there: Callable[[], bool]) -> None:
    """Return once something has come true."""
    end = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < end
        time.sleep(0.01)


def finished(client: openai.OpenAI, job: Any) -> Any:
    """The job once it is finished."""
    now = job

    def is_finished() -> bool:
        nonlocal now
        now = client.batches.retrieve(job.id)
        return now.status in FINISHED

    wait_for(is_finished)
    return now


def read(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    """The lines of a file; of none if there is no file."""
    content = b"" if file_id is None else client.files.content(file_id).content
    return [json.loads(each) for each in content.split(b"\n") if each]


def names_in(folder: Path) -> list[str]:
    """The files whose content is kept."""
    return sorted(path.name for path in (folder / "files").iterdir())
