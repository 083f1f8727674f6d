"""`inflight serve` works for honest clients during all faults at once: faulty clients, a dead engine, the shutdown.

One server goes through all of it. The test compares what clients saw with the server's log of the same requests.
"""

import asyncio
import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.coroutines import run
from tests.server.under_load.apis import ENDLESS, LONG, PATHS, PROMPTS, SHORT, Answer, ask, question
from tests.server.under_load.faults import Faults
from tests.server.under_load.served import Served, served

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found as Linux has them")

PLAN = {
    "leave_in_the_middle": 32,
    "leave_unanswered": 24,
    "send_garbage": 18,
    "send_an_endless_head": 4,
    "send_half": 24,
    "crowd_the_door": 2,
    "ask_for_too_many": 3,
    "send_too_much": 10,
    "send_a_wrong_key": 10,
    "send_nonsense": 24,
    "read_slowly": 4,
    "never_read": 3,
}
"""How often each fault is completed."""

NUM_HONEST, NUM_AT_FAULT = 24, 16


async def be_served_while_others_err(server: Served) -> None:
    """Run honest clients of all APIs while the faulty clients run."""
    faults, num_right, num_turned_away = Faults(server), Counter[str](), 0
    names = [name for name, number in PLAN.items() for _ in range(number)]
    random.Random(0).shuffle(names)
    left = list(enumerate(names))

    async def err() -> None:
        while left:
            number, name = left.pop()
            await faults.commit(name, random.Random(number))

    async def be_honest(number: int, others: "asyncio.Future[Any]") -> None:
        nonlocal num_turned_away
        path, prompt, stream = PATHS[number % 4], PROMPTS[number // 4 % 2], number % 3 > 0
        num_served = 0
        while not num_served or not others.done():
            answer = await ask(server.client, path, {**question(path, prompt, SHORT), "stream": stream})
            if answer.status == 429:
                num_turned_away += 1
                await asyncio.sleep(0.02)  # told to retry, the client does
                continue
            assert answer == Answer(200, server.right[path, prompt, SHORT], is_whole=True)
            num_served += 1
        num_right[f"{path}{' streamed' if stream else ''}"] += num_served

    try:
        others = asyncio.gather(*(err() for _ in range(NUM_AT_FAULT)))
        await asyncio.gather(others, *(be_honest(number, others) for number in range(NUM_HONEST)))
        await server.check_idle()
        assert faults.num_done == PLAN
        faults.check_log()
        for connection in faults.unread:
            assert b"data: [DONE]" not in _rest(connection)
    finally:
        for connection in faults.unread:
            connection.close()
    assert len(num_right) == 8
    print(f"honest and right: {num_right.total()} {dict(num_right)}, turned away before: {num_turned_away}")
    print(f"at fault: {faults.num_done.total()}, turned away before: {dict(faults.num_turned_away)}")


def _rest(connection: socket.socket) -> bytes:
    """The unread rest of a connection that was cut."""
    connection.settimeout(10)
    read = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            read += piece
    return read


Started: TypeAlias = list[tuple[str, bool, "asyncio.Task[Answer]"]]
"""The path, whether the answer is a stream, and the answer."""


async def begin(server: Served, max_tokens: int, num_each: int) -> Started:
    """Begin this number of streams and as many other requests of each API. All are admitted, none is done, and none
    continues before the engine may (SIGCONT)."""
    engine = server.engine_pid()
    for _ in range(5):
        started = await _begin(server, max_tokens, num_each)
        os.kill(engine, signal.SIGSTOP)
        assert await server.health() == 200
        if not any(task.done() for _, _, task in started):
            return started
        os.kill(engine, signal.SIGCONT)  # the engine was faster
        await asyncio.gather(*(task for _, _, task in started))
    raise AssertionError("requests were done before all had begun")


async def _begin(server: Served, max_tokens: int, num_each: int) -> Started:
    """The requests, once all are admitted or one is done."""

    def start(path: str, stream: bool, began: Callable[[], None] = lambda: None) -> "asyncio.Task[Answer]":
        body = {**question(path, PROMPTS[0], max_tokens), "stream": stream}
        return asyncio.create_task(ask(server.client, path, body, began))

    started: Started = []
    begun = [asyncio.Event() for _ in range(4 * num_each)]
    for path, event in zip(PATHS * num_each, begun, strict=True):
        started.append((path, True, start(path, True, event.set)))
    await asyncio.gather(*(event.wait() for event in begun))
    started += [(path, False, start(path, False)) for path in PATHS * num_each]
    while await server.num_inside() < len(started) and not any(task.done() for _, _, task in started):
        pass
    return started


async def lose_the_engine(server: Served) -> None:
    """Every client is told, and the next engine answers their next requests."""
    started = await begin(server, ENDLESS, 5)
    engine = server.engine_pid()
    os.kill(engine, signal.SIGKILL)

    async def follow(path: str, stream: bool, task: "asyncio.Task[Answer]") -> None:
        answer = await task
        assert "killed by SIGKILL" in answer.error["message"]
        assert not answer.is_whole
        assert answer.status == (200 if stream else 503)
        if stream:
            right = server.right[path, PROMPTS[0], LONG]
            assert answer.text
            assert right.startswith(answer.text[: len(right)])
        again = await ask(server.client, path, {**question(path, PROMPTS[0], SHORT), "stream": stream})
        assert (again.is_whole, again.text) == (True, server.right[path, PROMPTS[0], SHORT]), again

    await asyncio.gather(*(follow(*each) for each in started))
    assert server.engine_pid() != engine
    await server.check_idle()
    assert (await server.metrics())["inflight:engine_crashes_total"] == 1


async def end(server: Served) -> None:
    """Running requests finish, new ones are refused, and nothing is left."""
    started = await begin(server, LONG, 3)
    engine = server.engine_pid()
    try:
        server.process.send_signal(signal.SIGTERM)
        while await server.health() == 200:
            pass
        for path in PATHS:
            refused = await ask(server.client, path, question(path, PROMPTS[1], SHORT))
            assert (refused.status, refused.is_whole) == (503, False)
            assert "shutting down" in refused.error["message"]
        assert not any(task.done() for _, _, task in started)
    finally:
        os.kill(engine, signal.SIGCONT)
    for path, _, task in started:
        answer = await task
        assert answer == Answer(200, server.right[path, PROMPTS[0], LONG], is_whole=True)
    assert await server.process.wait() == 0
    assert not Path(f"/proc/{engine}").exists()


@pytest.mark.thorough
def test_the_server_works_during_and_after_all_faults(tmp_path: Path) -> None:
    async def check() -> None:
        async with served(tmp_path) as server:
            for phase in (Served.learn, be_served_while_others_err, lose_the_engine, end):
                start = time.monotonic()
                await phase(server)
                print(f"{phase.__name__}: {time.monotonic() - start:.1f} s")
            log = server.log.read_text()
            assert "Traceback" not in log
            (crash,) = [line for line in server.lines() if line["level"] in ("error", "critical")]
            assert crash["message"].startswith("the engine was killed by SIGKILL")

    run(check())
