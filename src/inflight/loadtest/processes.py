"""`run_in_processes`: one run sent by several processes, for loads beyond a single one.

Decides only who sends which request. All processes begin at the same moment of the machine's monotonic clock, so their
records can be put together.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier

from inflight.loadtest.openai_client import OpenAIClient
from inflight.loadtest.runner import LoadRequest, RequestRecord, WallClock, allow_connections, run_load

SECONDS_TO_MEET = 120.0
"""Seconds that the first process waits for the last to be ready."""

SECONDS_AHEAD = 0.05
"""Seconds between readiness and the start."""

_meeting: tuple[Barrier, "Synchronized[float]"]
"""In a sending process: the barrier, and the start time."""


@dataclass(frozen=True, slots=True)
class Share:
    """One process's share.

    Attributes:
        requests: in order of arrival.
        max_concurrency: most of them in flight; None: no limit.
    """

    base_url: str
    api_key: str | None
    path: str
    requests: Sequence[LoadRequest]
    max_concurrency: int | None
    timeout: float


def run_in_processes(
    client: OpenAIClient,
    path: str,
    requests: Sequence[LoadRequest],
    num_processes: int,
    *,
    max_concurrency: int | None = None,
    timeout: float = 600.0,
) -> tuple[list[RequestRecord], float]:
    """Send requests as `run_load` does. Blocks; returns their records in the same order, and the CPU seconds of all
    processes during the run.

    Args:
        client: of whose server and key each process makes a client of its own.
        max_concurrency: of all together; at least one for each process.
    """
    limits = _divided(max_concurrency, num_processes)
    shares = [
        Share(client.base_url, client.api_key, path, requests[number::num_processes], limits[number], timeout)
        for number in range(num_processes)
    ]
    context = multiprocessing.get_context("spawn")
    begin: Synchronized[float] = context.Value("d", 0.0)
    barrier = context.Barrier(num_processes, timeout=SECONDS_TO_MEET)
    records: list[RequestRecord | None] = [None] * len(requests)
    cpu_seconds = 0.0
    with ProcessPoolExecutor(num_processes, context, _enter, (barrier, begin)) as pool:
        for number, (part, spent) in enumerate(pool.map(_send, shares)):
            records[number::num_processes] = part
            cpu_seconds += spent
    return [record for record in records if record is not None], cpu_seconds


def _divided(most: int | None, number: int) -> list[int | None]:
    if most is None:
        return [None] * number
    return [most // number + (place < most % number) for place in range(number)]


def _enter(barrier: Barrier, begin: "Synchronized[float]") -> None:
    global _meeting
    _meeting = barrier, begin


def _send(share: Share) -> tuple[list[RequestRecord], float]:
    """In a child process: send a share of the requests."""
    allow_connections(len(share.requests))
    return asyncio.run(_run(share))


async def _run(share: Share) -> tuple[list[RequestRecord], float]:
    barrier, begin = _meeting
    async with OpenAIClient(share.base_url, share.api_key) as client:
        if barrier.wait() == 0:
            begin.value = time.perf_counter() + SECONDS_AHEAD
        barrier.wait()
        start, before = begin.value, time.process_time()
        await WallClock().sleep_until(start)
        records = await run_load(
            client,
            share.path,
            share.requests,
            max_concurrency=share.max_concurrency,
            timeout=share.timeout,
            start=start,
        )
        return records, time.process_time() - before
