"""`Broadcast`: polls the engines once for all open pages, at most five times a second.

Engines are watched only while a page is open. A slow page gets fewer messages; each has the whole state, so nothing is
missed.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from inflight.contracts.live import LiveState
from inflight.contracts.record import RecordTo
from inflight.entrypoints.async_llm import AsyncLLM
from inflight.host.machine import resident_bytes
from inflight.server.live.history import LoadHistory
from inflight.server.wire.json_route import to_json

logger = logging.getLogger("inflight.server")

INTERVAL = 0.2
"""Seconds between messages. With few cores each one delays a step: sending, reading and drawing it takes a core from
the engine."""

SECONDS_BETWEEN_SAME = 2.0
"""Seconds between messages when idle."""


class Broadcast:
    """The messages to pages.

    Args:
        record_to: where engines record their steps while a page is open; None: nowhere, or always.
        is_ending: whether the server is about to end; streams end then.
        interval: seconds between two messages.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        history: LoadHistory,
        record_to: RecordTo | None,
        is_ending: Callable[[], bool],
        interval: float = INTERVAL,
    ) -> None:
        self._llm, self._history, self._record_to, self._is_ending = llm, history, record_to, is_ending
        self._interval = interval
        self._looking: asyncio.Task[None] | None = None
        self._num_readers = 0
        self._changed = asyncio.Event()
        self._message = b""
        self._states: dict[int, LiveState] = {}
        self._blocks: dict[int, bytes] = {}

    @property
    def is_watching(self) -> bool:
        """Whether a page is open."""
        return self._num_readers > 0

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield the state on each change, as JSON objects, until the server is about to end, or polling fails (then
        call again)."""
        self._num_readers += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._watch())
        elif self._states:
            yield self._whole()
        try:
            while True:
                changed = self._changed
                await changed.wait()
                if self._looking is None or self._is_ending():
                    break
                yield self._message
        finally:
            self._num_readers -= 1
            if not self._num_readers and self._looking is not None:
                self._looking.cancel()
                self._looking, self._states = None, {}

    async def _watch(self) -> None:
        try:
            await self._look()
        except Exception:
            logger.exception("engines cannot be watched")
            self._looking, self._states = None, {}
            self._tell()

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        last_sent = float("-inf")
        async with aclosing(self._llm.watch(self._interval, self._record_to)) as states:
            async for state in states:
                now = loop.time()
                is_same = not any(each.num_steps for each in state.values()) and _queues(state) == _queues(self._states)
                self._states = state
                self._blocks.update((number, each.blocks) for number, each in state.items() if each.blocks is not None)
                if is_same and now - last_sent < SECONDS_BETWEEN_SAME and not self._is_ending():
                    continue
                last_sent = now
                self._message = self._written(state)
                self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _whole(self) -> bytes:
        """The first message of a new page, with the blocks."""
        return self._written({n: replace(each, blocks=self._blocks.get(n)) for n, each in self._states.items()})

    def _written(self, states: dict[int, LiveState]) -> bytes:
        message: dict[str, Any] = {
            "engines": states,
            "latencies": self._history.recent(),
            "resident_bytes": resident_bytes(),
        }
        return to_json(message)


def _queues(states: dict[int, LiveState]) -> list[tuple[object, ...]]:
    return [(number, each.running, each.waiting, each.stats.num_waiting) for number, each in states.items()]
