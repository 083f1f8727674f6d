"""`Worker`: gets batch jobs done, one after the other, the oldest first, and goes on where the ledger says they are.

Decides how many requests are in work, what is tried again, and which request an engine's death is blamed on. While the
results of some are being made durable, others are in work, but no more results are held than requests may be in work.
Requests that were in work when the engine died are done last, each alone: one that then kills the engine again gets an
error.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Protocol

import msgspec

from inflight.batches.batch import Batch, LineError, Status
from inflight.batches.files import Files
from inflight.batches.group_commit import GroupCommit
from inflight.batches.ledger import Ledger, Work
from inflight.batches.request_lines import RequestLine, read_lines
from inflight.batches.result_lines import Result, result_of_answer

LINES_AT_ONCE = 4096
"""Lines of a job that are read and added to the ledger in one transaction."""

MAX_ERRORS = 100
"""Most errors of a job's file that are reported."""

RETRIED = (429, 503)
"""Statuses of answers that say: later. All others are the request's result."""

SECONDS_BEFORE_RETRY = 0.5
SECONDS_AFTER_FAILURE = 10.0
"""When the disk is full, say, or a file cannot be read, a job is taken up again so much later."""

SECONDS_BETWEEN_SWEEPS = 600.0

GIVEN_UP = {
    "completed": ("engine_died", "the engine died each time that this request was in work, the second time alone"),
    "expired": ("batch_expired", "this request was not answered before the job's time was up"),
    "cancelled": ("batch_cancelled", "this request was not answered before the job was cancelled"),
}
"""Code and message of requests that have no answer when a job ends so."""

logger = logging.getLogger("inflight.batches")


class Answerer(Protocol):
    """Answers requests."""

    async def wait_until_ready(self) -> None:
        """Return once requests can be answered. Raises an exception if they never can be."""

    async def answer(self, url: str, body: bytes) -> tuple[int, bytes]:
        """Answer a request with a status and a body in JSON, as a server would. Cancelling this gives it up."""


class Worker:
    """Works through the jobs of a ledger.

    Args:
        max_in_work: the most requests in work at once.
        urls: what a request may name as its `url`.
        see: called with a job when it is taken up, and each time that something of it has changed.
        clock: gives the seconds of Unix time.
    """

    def __init__(
        self,
        ledger: Ledger,
        files: Files,
        answerer: Answerer,
        max_in_work: int,
        urls: Sequence[str],
        observe: Callable[[Batch], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ledger, self._files, self._answerer = ledger, files, answerer
        self._max_in_work, self._urls, self._observe, self._clock = max_in_work, urls, observe, clock
        self._news = asyncio.Event()
        self._answering: tuple[str, asyncio.Task[None]] | None = None

    def notify(self) -> None:
        """There is a new job."""
        self._news.set()

    async def cancel(self, batch_id: str) -> Batch:
        """Give up what is not answered of a job, unless it is finished or about to be; return it as it is then."""
        batch = await asyncio.to_thread(self._ledger.cancel, batch_id)
        if batch.status == "cancelling":
            if self._answering is not None and self._answering[0] == batch_id:
                self._answering[1].cancel()
            self.notify()
        self._observe(batch)
        return batch

    async def run(self) -> None:
        """Work until cancelled. Raises what `Answerer.wait_until_ready` does."""
        while True:
            try:
                await asyncio.to_thread(self._ledger.sweep)
                while await self.work_on_next():
                    pass
                seconds = SECONDS_BETWEEN_SWEEPS
            except (OSError, sqlite3.Error) as error:
                logger.error("batch jobs rest for %g s: %s", SECONDS_AFTER_FAILURE, error)
                seconds = SECONDS_AFTER_FAILURE
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), seconds)
            self._news.clear()

    async def work_on_next(self) -> bool:
        """Finish the oldest job that is not finished; return whether there was one.

        Raises `OSError` and `sqlite3.Error` if the disk is full, say; the job can be taken up again.
        """
        batch = await asyncio.to_thread(self._ledger.next_unfinished)
        if batch is None:
            return False
        self._observe(batch)
        if batch.status == "validating":
            batch = await self._validate(batch)
        if batch.status == "in_progress":
            try:
                batch = await self._answer_all(batch)
            except FileNotFoundError:
                logger.error("%s is cancelled: its file of requests is gone", batch.id)
                batch = await self.cancel(batch.id)
        if not batch.is_finished:
            batch = await self._advance(batch, "finalizing")
            code, message = GIVEN_UP[batch.ends_as]
            batch = await asyncio.to_thread(self._ledger.finalize, batch.id, code, message)
            self._observe(batch)
            await asyncio.to_thread(self._ledger.remove_lines, batch.id)
        return True

    async def _advance(self, batch: Batch, to: Status) -> Batch:
        batch = await asyncio.to_thread(self._ledger.advance, batch.id, to)
        self._observe(batch)
        return batch

    # ------------------------------------------------------------------------------------- reading lines

    async def _validate(self, batch: Batch) -> Batch:
        """Read all of a job's lines. If one is wrong, the job has failed."""
        await asyncio.to_thread(self._ledger.remove_lines, batch.id)  # an earlier validation may have been interrupted
        errors: list[LineError] = []
        num_lines = 0
        urls = self._urls if batch.endpoint is None else (batch.endpoint,)
        try:
            file = self._files.path_of(batch.input_file_id).open("rb")
        except FileNotFoundError:
            errors.append(LineError("file_not_found", "the file of this job was deleted"))
        else:
            with file:
                lines = read_lines(file, urls)
                while (chunk := await asyncio.to_thread(_next_chunk, lines)) and len(errors) < MAX_ERRORS:
                    errors += [each for each in chunk if isinstance(each, LineError)]
                    good = [each for each in chunk if isinstance(each, RequestLine)]
                    errors += await asyncio.to_thread(self._ledger.add_lines, batch.id, good)
                    num_lines += len(good)
        if not num_lines and not errors:
            errors.append(LineError("empty_file", "the file has no requests"))
        if not errors:
            return await self._advance(batch, "in_progress")
        errors.sort(key=lambda error: error.line or 0)
        batch = await asyncio.to_thread(self._ledger.fail, batch.id, errors[:MAX_ERRORS])
        self._observe(batch)
        await asyncio.to_thread(self._ledger.remove_lines, batch.id)
        return batch

    # ------------------------------------------------------------------------------------- answering

    async def _answer_all(self, batch: Batch) -> Batch:
        """Answer a job's requests until all are answered, its time is up, or it is cancelled."""
        results = GroupCommit(partial(self._ledger.add_results, batch.id), self._observe)
        answering = asyncio.create_task(self._answer_lines(batch, results))
        self._answering = (batch.id, answering)
        seconds = None if batch.expires_at is None else max(0.0, batch.expires_at - self._clock())
        try:
            await asyncio.wait({answering}, timeout=seconds)
            is_late = not answering.done()
        finally:
            self._answering = None
            answering.cancel()
            await asyncio.wait({answering})
            await results.finish()
        if is_late:
            batch = await asyncio.to_thread(self._ledger.expire, batch.id)
        elif not answering.cancelled():
            answering.result()
        return await asyncio.to_thread(self._ledger.get, batch.id) or batch

    async def _answer_lines(self, batch: Batch, results: GroupCommit) -> None:
        for num_crashes, most in ((0, self._max_in_work), (1, 1)):
            places, pages = _Places(most), self._ledger.work(batch, num_crashes)
            try:
                async with asyncio.TaskGroup() as group:
                    while (page := await asyncio.to_thread(next, pages, None)) is not None:
                        for work in page:
                            await places.unfinished.acquire()
                            await places.in_work.acquire()
                            group.create_task(self._answer_line(batch, work, results, places))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

    async def _answer_line(self, batch: Batch, work: Work, results: GroupCommit, places: "_Places") -> None:
        try:
            try:
                result = await self._result(batch, work)
            finally:
                places.in_work.release()
            if result is not None:
                await results.save(result)
        finally:
            places.unfinished.release()

    async def _result(self, batch: Batch, work: Work) -> Result | None:
        """What becomes of a request; None: the engine died. The first time, it has another chance later."""
        while True:
            await self._answerer.wait_until_ready()
            status, body = await self._answerer.answer(work.url, work.body)
            if status not in RETRIED:
                return result_of_answer(work.number, work.custom_id, status, body)
            if _code_of(body) == "engine_dead":
                await asyncio.to_thread(self._ledger.note_crash, batch.id, work.number)
                return None
            await asyncio.sleep(SECONDS_BEFORE_RETRY)


class _Places:
    """How many requests of a job may be in work at once, and how many in work or about to be durable."""

    def __init__(self, most: int) -> None:
        self.in_work = asyncio.Semaphore(most)
        self.unfinished = asyncio.Semaphore(2 * most)


def _next_chunk(lines: Iterator[RequestLine | LineError]) -> list[RequestLine | LineError]:
    return list(islice(lines, LINES_AT_ONCE))


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


def _code_of(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.code
    except msgspec.MsgspecError:
        return None
