"""`GroupCommit`: results that come while others are being written, and shortly after, are written together in the next
transaction: the thread that writes takes its turns from the one that answers.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from inflight.batches.batch import Batch
from inflight.batches.result_lines import Result

SECONDS_BETWEEN = 0.1
"""After a transaction the next one begins so much later."""


class GroupCommit:
    """Writes the results of one job.

    Args:
        write: writes results, all or none, and returns the job as it is then; it blocks until they are durable.
        see: called with the job each time.
    """

    def __init__(self, write: Callable[[list[Result]], Batch], observe: Callable[[Batch], None]) -> None:
        self._write, self._observe = write, observe
        self._waiting: list[tuple[Result, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._is_ending = asyncio.Event()

    async def save(self, result: Result) -> None:
        """Return once the result is durable. Raises what `write` does. If this is cancelled, it is written all the
        same."""
        saved = asyncio.get_running_loop().create_future()
        self._waiting.append((result, saved))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await saved

    async def finish(self) -> None:
        """Return once everything is written or has failed to be. Nothing may be saved afterwards."""
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
