"""`BatchJobs`: a server's files and batch jobs, and their worker."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastapi import Request

from inflight.batches.batch import Batch
from inflight.batches.database import Database
from inflight.batches.files import Files
from inflight.batches.ledger import Ledger
from inflight.batches.worker import Answerer, Worker
from inflight.server.wire.api_errors import ApiError

logger = logging.getLogger("inflight.batches")


class BatchJobs:
    """Files and jobs in a folder.

    Args:
        answerer: answers the requests of jobs.
        max_in_work: the most concurrent requests.
        observe: called with a job on each change.
        urls: the accepted paths of lines.

    Raises:
        OSError: the folder cannot be used, or another process has it.
    """

    def __init__(
        self, folder: Path, answerer: Answerer, max_in_work: int, observe: Callable[[Batch], None], urls: Sequence[str]
    ) -> None:
        self.urls = urls
        self._database = Database(folder.expanduser())
        self.files = Files(self._database)
        self.ledger = Ledger(self._database, self.files)
        log = _Log()

        def report(batch: Batch) -> None:
            log(batch)
            observe(batch)

        self.worker = Worker(self.ledger, self.files, answerer, max_in_work, urls, report)
        self._working: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start working, in the running event loop."""
        self._working = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Stop working, and release the folder. Unanswered requests are answered after the next start."""
        if self._working is not None:
            self._working.cancel()
            with suppress(asyncio.CancelledError):
                await self._working
        self._database.close()

    async def _work(self) -> None:
        try:
            await self.worker.run()
        except Exception:
            logger.exception("this server has stopped working on batch jobs")


class _Log:
    """Logs each status change of a job."""

    def __init__(self) -> None:
        self._last: tuple[str, str] | None = None

    def __call__(self, batch: Batch) -> None:
        if self._last != (batch.id, batch.status):
            self._last = batch.id, batch.status
            done = f"{batch.num_completed} of {batch.num_lines} requests answered, {batch.num_failed} failed"
            logger.info("%s is %s: %s", batch.id, batch.status, done)


def jobs_of(request: Request) -> BatchJobs:
    """The jobs of the request's application. Raises `ApiError` if it keeps none."""
    jobs: BatchJobs | None = request.app.state.batch_jobs
    if jobs is None:
        message = "this server keeps no files and no batch jobs; its operator can start it with --batch-dir"
        raise ApiError(404, message, code="batches_not_enabled")
    return jobs


def owner_of(request: Request) -> str:
    """The owner of the files and jobs of this request: the holder of its API key."""
    state: Mapping[str, Any] = request.scope.get("state", {})
    return str(state.get("owner", ""))


def check_parameters(request: Request, *names: str) -> None:
    """Raise `ApiError` for the first parameter of the query that is not one of these."""
    for name in request.query_params:
        if name not in names:
            raise ApiError(400, f"there is no parameter {name[:200]!r}; there is {' and '.join(names)}", param=name)


class HasId(Protocol):
    """An item of a list."""

    @property
    def id(self) -> str:
        """Its id."""


Item = TypeVar("Item", bound=HasId)


def page_of(items: Sequence[Item], after: str | None, limit: int) -> tuple[list[Item], dict[str, Any]]:
    """Return the items after the one with the id `after`, at most `limit`, and the fields of the list around them.

    Raises `ApiError` if there is no such item.
    """
    start = 0
    if after is not None:
        places = [place for place, item in enumerate(items) if item.id == after]
        if not places:
            raise ApiError(400, f"there is nothing with the id {after[:200]!r} in this list", param="after")
        start = places[0] + 1
    shown = list(items[start : start + limit])
    fields = {
        "object": "list",
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": start + limit < len(items),
    }
    return shown, fields
