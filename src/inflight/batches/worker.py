"""`Worker`: runs batch jobs one after another, the oldest first, resuming from the ledger.

It limits concurrent requests, retries, and isolates requests that crash the engine. While results are being written,
other requests run, but at most as many results are pending as requests may run. Requests that were running in a crash
are retried last, one at a time: one that crashes the engine again gets an error.
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
from inflight.batches.database import GroupCommit
from inflight.batches.files import Files
from inflight.batches.ledger import Ledger, Work
from inflight.batches.request_lines import RequestLine, Result, read_lines, result_of_answer

LINES_AT_ONCE = 4096
"""Lines read and added to the ledger in one transaction."""

MAX_ERRORS = 100
"""Most reported errors of a job's file."""

RETRIED = (429, 503)
"""Statuses to retry. All others are results."""

SECONDS_BEFORE_RETRY = 0.5
SECONDS_AFTER_FAILURE = 10.0
"""Seconds before a job is retried after an I/O error, such as a full disk."""

SECONDS_BETWEEN_SWEEPS = 600.0

GIVEN_UP = {
    "completed": ("engine_died", "the engine crashed twice while running this request, the second time alone"),
    "expired": ("batch_expired", "this request was not answered before the job expired"),
    "cancelled": ("batch_cancelled", "this request was not answered before the job was cancelled"),
}
"""Code and message of unanswered requests by final status."""

logger = logging.getLogger("inflight.batches")


class Answerer(Protocol):
    """Answers requests."""

    async def wait_until_ready(self) -> None:
        """Wait until requests can be answered. Raises if they never can be."""

    async def answer(self, url: str, body: bytes) -> tuple[int, bytes]:
        """Answer a request with a status and a JSON body, as a server would. Cancelling aborts it."""


class Worker:
    """Runs the jobs of a ledger.

    Args:
        max_in_work: the most concurrent requests.
        urls: accepted values of `url`.
        observe: called with a job when it starts, and on each change.
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
        """Notify of a new job."""
        self._news.set()

    async def cancel(self, batch_id: str) -> Batch:
        """Cancel a job's unanswered requests, unless it is finished or about to be; return the job."""
        batch = await asyncio.to_thread(self._ledger.cancel, batch_id)
        if batch.status == "cancelling":
            if self._answering is not None and self._answering[0] == batch_id:
                self._answering[1].cancel()
            self.notify()
        self._observe(batch)
        return batch

    async def run(self) -> None:
        """Work until cancelled. Raises `Answerer.wait_until_ready`'s errors."""
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
        """Run the oldest unfinished job; return whether there was one.

        Raises `OSError` and `sqlite3.Error`, for example when the disk is full; the job can be retried.
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
        """Read all of a job's lines. An invalid line fails the job."""
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
        """Answer a job's requests until all are answered, it expires, or it is cancelled."""
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
        """A request's result; None: the engine crashed. After the first crash it is retried."""
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
    """The most concurrent requests of a job, and the most running or about to be durable."""

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
