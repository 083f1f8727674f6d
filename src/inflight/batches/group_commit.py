"""`GroupCommit`: writes results that arrive during or shortly after a transaction together in the next one, since
writing takes the GIL from answering.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from inflight.batches.batch import Batch
from inflight.batches.result_lines import Result

SECONDS_BETWEEN = 0.1
"""Seconds between transactions."""


class GroupCommit:
    """Writes the results of one job.

    Args:
        write: writes results, all or none, and returns the updated job; it blocks until they are durable.
        see: called with the job each time.
    """

    def __init__(self, write: Callable[[list[Result]], Batch], observe: Callable[[Batch], None]) -> None:
        self._write, self._observe = write, observe
        self._waiting: list[tuple[Result, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._is_ending = asyncio.Event()

    async def save(self, result: Result) -> None:
        """Return once the result is durable. Raises `write`'s errors. If cancelled, the result is written
        nevertheless."""
        saved = asyncio.get_running_loop().create_future()
        self._waiting.append((result, saved))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await saved

    async def finish(self) -> None:
        """Wait until everything is written or has failed. Nothing may be saved afterwards."""
        self._is_ending.set()
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def _write_all(self) -> None:
        while self._waiting:
            together, self._waiting = self._waiting, []
            try:
                batch = await asyncio.to_thread(self._write, [result for result, _ in together])
            except Exception as error:
                for _, saved in together:
                    if not saved.done():
                        saved.set_exception(error)
            else:
                self._observe(batch)
                for _, saved in together:
                    if not saved.done():
                        saved.set_result(None)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_ending.wait(), SECONDS_BETWEEN)
        self._writing = None
