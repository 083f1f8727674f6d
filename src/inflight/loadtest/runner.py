"""Sends requests when they are due, independent of earlier ones, and records when their answers arrive.

The load is *open*: a request is due at its arrival, not when the server has time for it. Latencies count from then on,
so a client that is late or holds requests back (`max_concurrency`) makes them longer instead of hiding the delay (no
coordinated omission). Knows neither how requests are written nor how times are used.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from inflight.loadtest.openai_client import Chunk, OpenAIClient, ServerError


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request that is ready to be sent.

    Attributes:
        arrival: seconds after the start of the run.
        body: JSON.
        num_output_tokens: how many output tokens it asks for.
        num_prompt_tokens: the length of the prompt, if known without the server.
    """

    arrival: float
    body: bytes
    num_output_tokens: int
    num_prompt_tokens: int | None = None


@dataclass(slots=True)
class RequestRecord:
    """The record of a request. Times are in seconds after the start of the run.

    Attributes:
        scheduled: when it was due.
        sent: when it was sent.
        token_times: when chunks with parts of the answer arrived; chunks that are read together have the same time.
        finished: when the last chunk of the answer arrived, or when the request failed.
        num_prompt_tokens: the server's count; else the number sent, if known.
        num_output_tokens: the server's count; else the number of chunks.
        is_counted: whether the server counted the output tokens.
        failure: the failure, in one line; None: success.
    """

    scheduled: float
    sent: float = 0.0
    token_times: "array[float]" = field(default_factory=lambda: array("d"))
    finished: float = 0.0
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    is_counted: bool = False
    failure: str | None = None

    @property
    def time_to_first_token(self) -> float:
        """TTFT, in seconds: from when the request was due to its first chunk with text (to its end if its tokens have
        no text)."""
        return (self.token_times[0] if self.token_times else self.finished) - self.scheduled

    @property
    def latency(self) -> float:
        """E2E, in seconds: from when the request was due to its end."""
        return self.finished - self.scheduled

    @property
    def time_per_output_token(self) -> float | None:
        """TPOT: the mean seconds of all tokens after the first; None if there are none."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency - self.time_to_first_token) / (self.num_output_tokens - 1)

    @property
    def inter_token_latencies(self) -> list[float]:
        """ITL: the seconds between chunks that carry tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    def take_in(self, chunks: Sequence[Chunk], now: float) -> None:
        """Add chunks that were read at `now`."""
        for chunk in chunks:
            if chunk.carries_tokens:
                self.token_times.append(now)
                self.finished = now
            elif chunk.choices:
                self.finished = now
            if chunk.usage is not None:
                self._count(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        if not self.is_counted:
            self.num_output_tokens = len(self.token_times)

    def _count(self, num_prompt_tokens: int | None, num_output_tokens: int | None) -> None:
        if num_prompt_tokens is not None:
            self.num_prompt_tokens = num_prompt_tokens
        if num_output_tokens is not None:
            self.num_output_tokens, self.is_counted = num_output_tokens, True


@dataclass(slots=True)
class Tally:
    """The progress of a run."""

    num_sent: int = 0
    num_completed: int = 0
    num_failed: int = 0


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def now(self) -> float: ...

    async def sleep_until(self, moment: float) -> None: ...


class WallClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.perf_counter()

    async def sleep_until(self, moment: float) -> None:
        while (rest := moment - time.perf_counter()) > 0:
            await asyncio.sleep(rest)


async def run_load(
    client: OpenAIClient,
    path: str,
    requests: Sequence[LoadRequest],
    *,
    max_concurrency: int | None = None,
    timeout: float = 600.0,
    clock: Clock | None = None,
    watch: Callable[[Tally], None] = lambda tally: None,
    start: float | None = None,
) -> list[RequestRecord]:
    """Send each request when it is due, and return their records in the same order.

    Args:
        path: the endpoint's path.
        requests: in order of arrival.
        max_concurrency: most requests in flight; others wait, and their waiting counts as latency.
        timeout: seconds after sending at which a request fails.
        watch: called when a request is sent or ends.
        start: when the run begins by the clock; None: now.
    """
    clock, tally = clock or WallClock(), Tally()
    start = clock.now() if start is None else start
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None
    records = [RequestRecord(request.arrival, num_prompt_tokens=request.num_prompt_tokens) for request in requests]

    async def follow(request: LoadRequest, record: RequestRecord) -> None:
        async with AsyncExitStack() as stack:
            if gate is not None:
                await stack.enter_async_context(gate)
            record.sent = clock.now() - start
            tally.num_sent += 1
            watch(tally)
            try:
                async with asyncio.timeout(timeout), aclosing(client.stream(path, request.body)) as answer:
                    async for chunks in answer:
                        record.take_in(chunks, clock.now() - start)
            except TimeoutError:
                record.failure = f"not finished within {timeout:g} s"
            except ServerError as error:
                record.failure = str(error)
            if record.failure is None and not record.num_output_tokens:
                record.failure = "the answer is empty"
            if record.failure is not None or not record.finished:
                record.finished = clock.now() - start
            if record.failure is None:
                tally.num_completed += 1
            else:
                tally.num_failed += 1
            watch(tally)

    async with asyncio.TaskGroup() as group:
        for request, record in zip(requests, records, strict=True):
            if request.arrival > 0:
                await clock.sleep_until(start + request.arrival)
            group.create_task(follow(request, record))
    return records


def allow_connections(count: int) -> None:
    """Raise this process's limit to `count` open connections, as far as the system allows: one for each request."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 100
    if soft != resource.RLIM_INFINITY and soft < wanted:
        at_most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, at_most), hard))
