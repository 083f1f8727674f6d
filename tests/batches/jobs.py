"""Jobs for tests, and answerers that need no model."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inflight.batches.batch import Batch
from inflight.batches.database import Database
from inflight.batches.files import Files
from inflight.batches.ledger import Ledger
from inflight.batches.worker import Worker

COMPLETIONS = "/v1/completions"
URLS = (COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/v1/embeddings")


class Clock:
    """Unix time in seconds that the test advances."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class Echo:
    """Answers each request with its own prompt.

    Attributes:
        asked: the prompts, in the order in which they came.
        answers: called with each prompt; returns its status and body instead, or None.
    """

    def __init__(self, answers: Callable[[Any], Any] = lambda _: None) -> None:
        self.asked: list[Any] = []
        self.answers = answers
        self.num_ready = 0

    async def wait_until_ready(self) -> None:
        self.num_ready += 1

    async def answer(self, url: str, body: bytes) -> tuple[int, bytes]:
        prompt = json.loads(body)["prompt"]
        self.asked.append(prompt)
        given = self.answers(prompt)
        if asyncio.iscoroutine(given):
            given = await given
        await asyncio.sleep(0)
        return given or (200, echo(prompt))


def echo(prompt: Any) -> bytes:
    """What `Echo` answers."""
    return json.dumps({"echo": prompt, "usage": {"prompt_tokens": 2, "completion_tokens": 3}}).encode()


def error(code: str, status: int = 503) -> tuple[int, bytes]:
    """An answer that is an error."""
    return status, json.dumps({"error": {"code": code, "message": "no"}}).encode()


def requests(prompts: Sequence[Any]) -> bytes:
    """A batch file; the `custom_id` of each line is its number, from 1."""
    lines = (
        {"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": {"prompt": prompt}}
        for number, prompt in enumerate(prompts, 1)
    )
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


class Jobs:
    """A folder of jobs, opened."""

    def __init__(self, folder: Path, clock: Callable[[], float] | None = None) -> None:
        self.database = Database(folder)
        self.clock = clock or Clock()
        self.files = Files(self.database, self.clock)
        self.ledger = Ledger(self.database, self.files, self.clock)

    def create(self, content: bytes, seconds: int | None = None, endpoint: str = COMPLETIONS, **options: Any) -> Batch:
        """Begin a job of these lines."""
        new = self.files.create()
        new.write(content)
        file = self.files.add(new, "", "requests.jsonl", "batch")
        return self.ledger.create(file.id, endpoint, "24h", seconds, **options)

    def worker(self, answerer: Any, max_in_work: int = 4, observe: Callable[[Batch], None] = lambda _: None) -> Worker:
        """A worker for these jobs."""
        return Worker(self.ledger, self.files, answerer, max_in_work, URLS, observe, self.clock)

    def finish(self, answerer: Any, **options: Any) -> None:
        """Run all jobs."""

        async def work() -> None:
            worker = self.worker(answerer, **options)
            while await worker.work_on_next():
                pass

        asyncio.run(work())

    def get(self, batch: Batch) -> Batch:
        """A job as it is now."""
        now = self.ledger.get(batch.id)
        assert now is not None
        return now

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """The lines of a file; none if there is no file."""
        if file_id is None:
            return []
        return [json.loads(line) for line in self.files.path_of(file_id).read_text().splitlines()]

    def results(self, batch: Batch) -> list[tuple[str, Any]]:
        """The `custom_id` and the echo of each result."""
        lines = self.lines(self.get(batch).output_file_id)
        return [(line["custom_id"], line["response"]["body"]["echo"]) for line in lines]

    def errors(self, batch: Batch) -> list[tuple[str, Any]]:
        """The `custom_id` of each error, and its code or status."""
        lines = self.lines(self.get(batch).error_file_id)
        return [
            (line["custom_id"], line["error"]["code"] if line["error"] else line["response"]["status_code"])
            for line in lines
        ]
