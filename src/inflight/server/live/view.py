"""`LiveView`: shared state of the live page's endpoints, for one server.

`Broadcast`: polls the engines once for all open pages, at most five times a second.

Engines are watched only while a page is open. A slow page gets fewer messages; each has the whole state, so nothing is
missed.
"""

import asyncio
import logging
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from inflight.contracts.step.live import LiveState
from inflight.contracts.step.record import RecordTo
from inflight.engine.replicas.live_states import recording_of
from inflight.entrypoints.async_llm import AsyncLLM
from inflight.host.machine import resident_bytes
from inflight.server.live.history import LoadHistory
from inflight.server.serving.service import RunningRequest
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


MAX_RECORDED_BYTES = 2**25
"""Bytes of each of two files of steps recorded while a page is open."""


class LiveView:
    """The view of one server.

    Args:
        record_to: where the operator records all steps; None: a temporary folder, while a page is open.
        is_ending: whether the server is about to end.
        shows_texts: whether every client with a key may see prompts and answers.

    Attributes:
        history: must be one of the server's observers.
        broadcast: the messages to pages.
        simulating: held by the one simulation that may run.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        record_to: RecordTo | None = None,
        is_ending: Callable[[], bool] = lambda: False,
        *,
        shows_texts: bool = False,
    ) -> None:
        self._llm = llm
        self.shows_texts = shows_texts
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        to_file: RecordTo | None = None
        if record_to is None:
            self._folder = tempfile.TemporaryDirectory(prefix="inflight-", ignore_cleanup_errors=True)
            record_to = to_file = RecordTo(
                path=str(Path(self._folder.name) / "steps.jsonl"), max_bytes=MAX_RECORDED_BYTES, num_files=2
            )
        self._recorded_in = record_to
        self.records_always = to_file is None
        self.simulating = asyncio.Lock()
        self.history = LoadHistory()
        self.broadcast = Broadcast(llm, self.history, to_file, is_ending)

    def recording(self, engine: int) -> Path:
        """The file with the last recorded steps of an engine."""
        return Path(recording_of(self._recorded_in, engine, self._llm.num_replicas).path)

    def close(self) -> None:
        """Remove the temporary recordings."""
        if self._folder is not None:
            self._folder.cleanup()

    def described(self, request_id: str, running: RunningRequest) -> dict[str, Any]:
        """The visible part of a running request, without texts unless shown."""
        params, now = running.params, time.monotonic()
        first = running.first_token_time
        about: dict[str, Any] = {
            "id": request_id,
            "seconds": now - running.start_time,
            "seconds_to_first_token": None if first is None else first - running.start_time,
            "num_prompt_tokens": len(running.prompt_token_ids),
            "num_output_tokens": running.num_tokens,
            "priority": running.priority,
            "n": params.n,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "seed": params.seed,
            "logprobs": params.logprobs,
            "is_structured": params.structured_output is not None,
        }
        if running.texts is not None and self._llm.tokenizer is not None:
            about["prompt"] = self._llm.tokenizer.decode(list(running.prompt_token_ids))
            about["texts"] = ["".join(pieces) for pieces in running.texts]
        return about
