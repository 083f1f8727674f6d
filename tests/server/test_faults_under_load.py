"""`inflight serve` as it runs for others, while everything goes wrong at once: faulty clients, a dead engine, the end.

One server goes through all of it. What clients saw is held against what the server's log says of the same requests.
"""

import asyncio
import json
import os
import random
import re
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import pytest
import uvicorn

from inflight.server.operations import heads
from tests.server.operations.serving import SmallServer, connected, read_answer, run

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found as Linux has them")

KEY = "sk-of-the-honest"
MAX_BODY, MAX_REQUESTS, MAX_WAITING, MAX_SEQS = 100_000, 120, 60, 32
LIMITS = {
    "--max-body-size": MAX_BODY,
    "--max-requests": MAX_REQUESTS,
    "--max-num-waiting": MAX_WAITING,
    "--max-num-seqs": MAX_SEQS,
    "--max-stall": 2,
    "--num-blocks": 150,
    "--grace-period": 100,
}
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = (COMPLETIONS, CHAT, RESPONSES, MESSAGES)
PROMPTS = ("Tell me a story about a fox.", "One morning")
SHORT, LONG, ENDLESS = 24, 80, 900
FLAGS = {
    "type": "object",
    "properties": {"flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1000}},
    "required": ["flags"],
    "additionalProperties": False,
}
"""Does not fit into the context: who is asked for it goes on until stopped."""

SECONDS_FROM_KILL_TO_END = 10.0
"""Promised are 2; the machine may have other work."""

Json: TypeAlias = dict[str, Any]


# ---------------------------------------------------------------------------------------- the four APIs


def question(path: str, prompt: str, max_tokens: int) -> Json:
    """What is sent. From `LONG` on, an answer that does not end before its limit."""
    body: Json = {"temperature": 0, "max_output_tokens" if path == RESPONSES else "max_tokens": max_tokens}
    if path == COMPLETIONS:
        body["prompt"] = prompt
    elif path == RESPONSES:
        body["input"] = prompt
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
    if max_tokens >= LONG:
        flags = {"type": "json_schema", "schema": FLAGS}
        ways = {
            RESPONSES: {"text": {"format": flags | {"name": "flags"}}},
            MESSAGES: {"output_config": {"format": flags}},
        }
        body |= ways.get(path, {"ignore_eos": True})
    return body


def text_of(path: str, answer: Json) -> str:
    """Of a whole answer."""
    if path in (COMPLETIONS, CHAT):
        (choice,) = answer["choices"]
        return str(choice["text"] if path == COMPLETIONS else choice["message"]["content"])
    (block,) = answer["content"] if path == MESSAGES else answer["output"][0]["content"]
    return str(block["text"])


def piece_of(path: str, event: Json) -> str:
    """The text in an event of a stream."""
    if path == COMPLETIONS:
        return "".join(choice["text"] for choice in event["choices"])
    if path == CHAT:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if path == RESPONSES:
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
    return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""


GOOD_ENDS = {"message_stop", "response.completed", "response.incomplete"}


@dataclass
class Answer:
    """What a client got.

    Attributes:
        text: as far as it came.
        is_whole: whether it came to its own good end.
        error: what it was told, if something went wrong.
        end: when it had heard all (`time.monotonic()`).
    """

    status: int
    text: str = ""
    is_whole: bool = False
    error: Json = field(default_factory=dict)
    end: float = 0.0


async def ask(client: aiohttp.ClientSession, path: str, body: Json, began: Callable[[], None] = lambda: None) -> Answer:
    """Ask, and hear the answer to its end; `began` is called when the first of its text has come."""
    async with client.post(path, json=body) as response:
        answer = Answer(response.status)
        if response.content_type != "text/event-stream":
            told = await response.json()
            answer.error = told.get("error") or {}
            if not answer.error:
                answer.text, answer.is_whole = text_of(path, told), True
        else:
            async for line in response.content:
                assert not answer.is_whole or not line.strip(), "something came behind the end"
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]\n":
                    answer.is_whole = True
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                answer.error = event.get("error") or event.get("response", {}).get("error") or {}
                if answer.error:
                    continue
                if piece := piece_of(path, event):
                    answer.text += piece
                    began()
                answer.is_whole = event.get("type") in GOOD_ENDS
        answer.end = time.monotonic()
    return answer


# ---------------------------------------------------------------------------------------- the server


@dataclass
class Served:
    """The command, running.

    Attributes:
        right: the text that is right for an API, a prompt, and a number of tokens: what it gives when it is alone.
    """

    process: asyncio.subprocess.Process
    url: str
    client: aiohttp.ClientSession
    log: Path
    right: dict[tuple[str, str, int], str] = field(default_factory=dict)

    async def learn(self) -> None:
        """What is right."""
        for path in PATHS:
            for prompt, max_tokens in ((PROMPTS[0], SHORT), (PROMPTS[1], SHORT), (PROMPTS[0], LONG)):
                answer = await ask(self.client, path, question(path, prompt, max_tokens))
                assert answer.is_whole, answer
                self.right[path, prompt, max_tokens] = answer.text

    async def health(self) -> int:
        async with self.client.get("/health") as answer:
            return answer.status

    async def metrics(self) -> dict[str, float]:
        """Each summed over its labels."""
        found: dict[str, float] = {}
        async with self.client.get("/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if not line.startswith("#"):
                    name = re.split("[{ ]", line)[0]
                    found[name] = found.get(name, 0) + float(line.rpartition(" ")[2])
        return found

    async def num_inside(self) -> float:
        """Sequences that run or wait."""
        metrics = await self.metrics()
        return metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]

    async def check_idle(self) -> None:
        """Return once nothing runs and nobody is connected any more; and see that nothing was kept."""
        while await self.num_inside():
            pass
        while self.num_sockets() > 1:  # it listens
            assert await self.health() == 200
        metrics = await self.metrics()
        assert metrics["inflight:engine_up"] == 1
        assert metrics["vllm:kv_cache_usage_perc"] == 0

    def num_sockets(self) -> int:
        """Those that are bound to its port: one listens, and the others are connections of clients."""
        port = f":{int(self.url.rpartition(':')[2]):04X}"
        own = set()
        for path in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                own.add(os.readlink(path))
        lines = [line.split() for line in Path(f"/proc/{self.process.pid}/net/tcp").read_text().splitlines()[1:]]
        return sum(line[1].endswith(port) and f"socket:[{line[9]}]" in own for line in lines)

    def engine_pid(self) -> int:
        """The child of the server's process."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(FileNotFoundError, ProcessLookupError):
                if int(path.read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    found.append(int(path.parent.name))
        (pid,) = found
        return pid

    def lines(self) -> list[Json]:
        """What it has logged."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Served]:
    (folder / "keys").write_text(KEY)
    options = [str(part) for option in LIMITS.items() for part in option]
    options += ["--api-key-file", str(folder / "keys"), "--dtype", "float32", "--log-format", "json"]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "inflight", "serve", "--port", "0", *options),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        match = re.fullmatch(r"inflight: inflight-demo is served at (http://127\.0\.0\.1:\d+)\n", line)
        assert match, (folder / "log").read_text()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        headers = {"Authorization": f"Bearer {KEY}"}
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(match[1], connector=connector, headers=headers, timeout=timeout) as client:
            yield Served(process, match[1], client, folder / "log")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


# ---------------------------------------------------------------------------------------- clients at fault


def wire(path: str, body: bytes, *headers: str, key: str = KEY, length: str | None = None) -> bytes:
    """A request as it is sent."""
    lines = [f"POST {path} HTTP/1.1", "Host: here", "Connection: close", f"Authorization: Bearer {key}", *headers]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}" if length is None else length]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class TurnedAwayError(Exception):
    """The server was too busy with others for a fault: it is to be tried again."""


class Faults:
    """Clients that do something wrong, and see that they get what they deserve.

    Attributes:
        logged: ids of requests, and what the server's log must say of each: one of these statuses, why it ended.
        num_begun: how often each fault was begun.
        num_done: and how often it was done.
        num_turned_away: requests that were told to come again, by the code of the error.
        unread: connections that nobody reads.
    """

    def __init__(self, server: Served) -> None:
        self.server = server
        self.logged: dict[str, tuple[set[int], str | None]] = {}
        self.num_begun: Counter[str] = Counter()
        self.num_done: Counter[str] = Counter()
        self.num_turned_away: Counter[str] = Counter()
        self.unread: list[socket.socket] = []

    async def commit(self, name: str, chance: random.Random) -> None:
        """One fault, again and again until the server was not too busy for it."""
        turn = self.num_begun[name]
        self.num_begun[name] += 1
        while True:
            try:
                await getattr(self, name)(chance, turn)
            except TurnedAwayError as code:
                self.num_turned_away[str(code)] += 1
                await asyncio.sleep(0.02)  # as long as such a client waits
            else:
                self.num_done[name] += 1
                return

    def check_log(self) -> None:
        """The server has seen what these clients say that they did."""
        lines = {line["request_id"]: line for line in self.server.lines() if "request_id" in line}
        for name, (statuses, reason) in self.logged.items():
            assert lines[name]["status"] in statuses, lines[name]
            assert reason is None or set(lines[name]["finish_reasons"]) == {reason}, lines[name]

    # Each of these is a fault; it may be of another kind each turn.

    async def leave_in_the_middle(self, chance: random.Random, turn: int) -> None:
        """Of a stream."""
        path, body = _endless(chance, stream=True)
        name, label = self._label({200}, "abort")
        async with connected(self.server.url) as (reader, writer):
            writer.write(wire(path, body, label))
            await self._accepted(name, reader)
            for _ in range(chance.randrange(1, 25)):
                await reader.readuntil(b"data: ")
            _leave(writer, chance)

    async def leave_unanswered(self, chance: random.Random, turn: int) -> None:
        path, body = _endless(chance)
        async with connected(self.server.url) as (_, writer):
            writer.write(wire(path, body, self._label({499, 429})[1]))
            await writer.drain()

    async def send_garbage(self, chance: random.Random, turn: int) -> None:
        start = b"POST /v1/completions HTTP/1.1\r\nContent-Length: "
        kinds = (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200),  # somebody wants TLS
            chance.randbytes(chance.randrange(100, 10_000)),
            start + b"-1\r\n\r\n",
            start + b"1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"GET /\xff\xfe HTTP/1.1\r\nHost: here\r\n\r\n",
            b"HTTP/1.1 200 OK\r\n\r\n",
        )
        async with connected(self.server.url) as (reader, writer):
            writer.write(kinds[turn % len(kinds)])
            assert (await reader.read()).startswith(b"HTTP/1.1 400")

    async def send_an_endless_head(self, chance: random.Random, turn: int) -> None:
        async with connected(self.server.url) as (reader, writer):
            head = b"GET /health HTTP/1.1\r\nHost: here\r\nX-Long: "
            writer.write(head + b"x" * (heads.MAX_HEAD_BYTES + 1 - len(head)))
            assert (await reader.read()).startswith(b"HTTP/1.1 431")

    async def send_half(self, chance: random.Random, turn: int) -> None:
        """Of a request."""
        path, body = _endless(chance, stream=True)
        whole = wire(path, body)
        async with connected(self.server.url) as (_, writer):
            writer.write(whole[: chance.randrange(1, len(whole))])
            await writer.drain()
            _leave(writer, chance)

    async def crowd_the_door(self, chance: random.Random, turn: int) -> None:
        """More than may be inside send half a body; those who are too many hear so."""
        half = wire(CHAT, b'{"mess', length="Content-Length: 100")
        answers = []
        async with AsyncExitStack() as stack:
            for _ in range(MAX_REQUESTS + 10):
                reader, writer = await stack.enter_async_context(connected(self.server.url))
                writer.write(half)
                answers.append(asyncio.create_task(read_answer(reader)))
            done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
            for status, headers, body in (each.result() for each in done):
                assert (status, headers["retry-after"]) == (429, "1")
                assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def ask_for_too_many(self, chance: random.Random, turn: int) -> None:
        """Some sequences are taken in before it is too much, and have to be let go."""
        prompts = [[5, 6, number + 6] for number in range(MAX_SEQS + MAX_WAITING + 20)]
        body = {"prompt": prompts, "max_tokens": ENDLESS, "ignore_eos": True}
        error = await self._refused(COMPLETIONS, json.dumps(body).encode(), 429)
        if error["code"] != "queue_full":
            raise TurnedAwayError(error["code"])

    async def send_too_much(self, chance: random.Random, turn: int) -> None:
        path, chunk = chance.choice(PATHS), b"4000\r\n%b\r\n" % (b"x" * 0x4000)
        if turn % 2:
            await self._refused(path, b"", 413, length=f"Content-Length: {10**12}")
        else:
            await self._refused(path, chunk * (MAX_BODY // 0x4000 + 1), 413, length="Transfer-Encoding: chunked")

    async def send_a_wrong_key(self, chance: random.Random, turn: int) -> None:
        key = chance.choice(["", "sk-other", f"{KEY}x", KEY[:-1], "\xff"])
        await self._refused(*_endless(chance, stream=True), 401, key=key)

    async def send_nonsense(self, chance: random.Random, turn: int) -> None:
        path = chance.choice(PATHS)
        good = question(path, PROMPTS[0], SHORT)
        kinds: tuple[tuple[str, bytes, int], ...] = (
            (path, chance.randbytes(100), 400),
            (path, b'{"messages": ' + b"[" * 5000, 400),
            (path, json.dumps(good | {"tempreature": 1}).encode(), 400),
            (path, json.dumps(good | {"temperature": "hot"}).encode(), 400),
            (path, json.dumps(good | {"model": "another"}).encode(), 404),
            ("/v1/other", b"{}", 404),
            (path, json.dumps(question(path, "fox " * 9999, SHORT)).encode(), 400),
            (CHAT, json.dumps(question(CHAT, "x", SHORT) | {"response_format": {"type": "json_schema"}}).encode(), 400),
        )
        await self._refused(*kinds[turn % len(kinds)])

    async def read_slowly(self, chance: random.Random, turn: int) -> None:
        """All of it comes all the same."""
        body = {**question(COMPLETIONS, PROMPTS[1], SHORT), "n": 4, "logprobs": 20, "stream": True}
        name, label = self._label({200}, "length")
        reader, writer = await asyncio.open_connection(sock=await self._narrow(), limit=1024)
        with closing(writer):
            writer.write(wire(COMPLETIONS, json.dumps(body).encode(), label))
            await self._accepted(name, reader)
            events = b""
            while piece := await reader.read(1024):
                events += piece
                await asyncio.sleep(0.001)  # it is slow
        texts = [""] * 4
        for event in re.findall(rb"^data: (\{.*\})\r?$", events, re.MULTILINE):
            for choice in json.loads(event)["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [self.server.right[COMPLETIONS, PROMPTS[1], SHORT]] * 4
        assert b"data: [DONE]" in events

    async def never_read(self, chance: random.Random, turn: int) -> None:
        body = {**question(COMPLETIONS, PROMPTS[1], ENDLESS), "n": 8, "logprobs": 20, "stream": True}
        name, label = self._label({200}, "abort")
        connection, loop = await self._narrow(), asyncio.get_running_loop()
        await loop.sock_sendall(connection, wire(COMPLETIONS, json.dumps(body).encode(), label))
        if await loop.sock_recv(connection, 12) == b"HTTP/1.1 200":
            self.unread.append(connection)  # and that was all
        else:
            connection.close()
            self.logged[name] = ({429}, None)
            raise TurnedAwayError("before the first byte")

    # What they have in common.

    def _label(self, statuses: set[int], reason: str | None = None) -> tuple[str, str]:
        """An id that the log will be searched for, and the header that has it."""
        name = f"fault-{len(self.logged)}"
        self.logged[name] = (statuses, reason)
        return name, f"X-Request-Id: {name}"

    async def _accepted(self, name: str, reader: asyncio.StreamReader) -> None:
        """Read the head of an answer; it has to be a good one."""
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 429"):
            self.logged[name] = ({429}, None)
            raise TurnedAwayError("when it asked for a stream")
        assert head.startswith(b"HTTP/1.1 200"), head

    async def _refused(self, path: str, body: bytes, status: int, **how: Any) -> Json:
        """The error of a request that is answered with this status."""
        name, label = self._label({status})
        async with connected(self.server.url) as (reader, writer):
            writer.write(wire(path, body, label, **how))
            got, _, told = await read_answer(reader)
        error: Json = json.loads(told)["error"]
        if got == 429 != status:
            self.logged[name] = ({429}, None)
            raise TurnedAwayError(error.get("code") or error["type"])
        assert got == status, told
        assert error["message"]
        return error

    async def _narrow(self) -> socket.socket:
        """A connection that holds little of what is not read."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        host, _, port = self.server.url.removeprefix("http://").partition(":")
        await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        return connection


def _endless(chance: random.Random, **more: Any) -> tuple[str, bytes]:
    path = chance.choice(PATHS)
    return path, json.dumps(question(path, chance.choice(PROMPTS), ENDLESS) | more).encode()


def _leave(writer: asyncio.StreamWriter, chance: random.Random) -> None:
    """Politely, or with a reset."""
    if chance.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


# ---------------------------------------------------------------------------------------- what happens

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
"""How often each fault is done."""

NUM_HONEST, NUM_AT_FAULT = 24, 16


async def be_served_while_others_err(server: Served) -> None:
    """Honest clients of all APIs, as long as the others go on."""
    faults, num_right, num_turned_away = Faults(server), Counter[str](), 0
    names = [name for name, number in PLAN.items() for _ in range(number)]
    random.Random(0).shuffle(names)
    left = list(enumerate(names))

    async def err() -> None:
        while left:
            number, name = left.pop()
            await faults.commit(name, random.Random(number))

    async def be_honest(number: int, others: "asyncio.Task[Any]") -> None:
        nonlocal num_turned_away
        path, prompt, stream = PATHS[number % 4], PROMPTS[number // 4 % 2], number % 3 > 0
        num_served = 0
        while not num_served or not others.done():
            answer = await ask(server.client, path, {**question(path, prompt, SHORT), "stream": stream})
            if answer.status == 429:
                num_turned_away += 1
                await asyncio.sleep(0.02)  # told to come again, it does
                continue
            assert answer == Answer(200, server.right[path, prompt, SHORT], is_whole=True, end=answer.end)
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
    """What still lies in a connection that was cut."""
    connection.settimeout(10)
    read = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            read += piece
    return read


async def begin(server: Served, max_tokens: int, num_each: int) -> list[tuple[str, bool, "asyncio.Task[Answer]"]]:
    """So many streams and as many other requests of each API, once all are inside: path, whether it streams, answer."""

    def start(path: str, stream: bool, began: Callable[[], None] = lambda: None) -> "asyncio.Task[Answer]":
        body = {**question(path, PROMPTS[0], max_tokens), "stream": stream}
        return asyncio.create_task(ask(server.client, path, body, began))

    started = []
    begun = [asyncio.Event() for _ in range(4 * num_each)]
    for path, event in zip(PATHS * num_each, begun, strict=True):
        started.append((path, True, start(path, True, event.set)))
    await asyncio.gather(*(event.wait() for event in begun))
    started += [(path, False, start(path, False)) for path in PATHS * num_each]
    while await server.num_inside() < len(started):
        pass
    return started


async def lose_the_engine(server: Served) -> None:
    """Everybody hears of it soon, and the next request of each is answered by the next engine."""
    started = await begin(server, ENDLESS, 5)
    engine = server.engine_pid()
    os.kill(engine, signal.SIGKILL)
    killed = time.monotonic()

    async def follow(path: str, stream: bool, task: "asyncio.Task[Answer]") -> float:
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
        return answer.end - killed

    seconds = await asyncio.gather(*(follow(*each) for each in started))
    print(f"from kill to end: {min(seconds):.3f} to {max(seconds):.3f} s, of {len(seconds)} requests")
    assert max(seconds) < SECONDS_FROM_KILL_TO_END
    assert server.engine_pid() != engine
    await server.check_idle()
    assert (await server.metrics())["inflight:engine_crashes_total"] == 1


async def end(server: Served) -> None:
    """What runs is finished, what comes is refused, and nothing is left."""
    started = await begin(server, LONG, 3)
    engine = server.engine_pid()
    server.process.send_signal(signal.SIGTERM)
    while await server.health() == 200:
        pass
    for path in PATHS:
        refused = await ask(server.client, path, question(path, PROMPTS[1], SHORT))
        assert (refused.status, refused.is_whole) == (503, False)
        assert "shutting down" in refused.error["message"]
    assert not any(task.done() for _, _, task in started)
    for path, _, task in started:
        answer = await task
        assert answer == Answer(200, server.right[path, PROMPTS[0], LONG], is_whole=True, end=answer.end)
    assert await server.process.wait() == 0
    assert not Path(f"/proc/{engine}").exists()


def test_the_server_goes_through_all_of_it(tmp_path: Path) -> None:
    async def check() -> None:
        async with served(tmp_path) as server:
            await server.learn()
            for phase in (be_served_while_others_err, lose_the_engine, end):
                start = time.monotonic()
                await phase(server)
                print(f"{phase.__name__}: {time.monotonic() - start:.1f} s")
            log = server.log.read_text()
            assert "Traceback" not in log
            assert not [line for line in server.lines() if line["level"] in ("error", "critical")]

    run(check())


def test_who_connects_and_says_nothing_or_half_a_head_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "SECONDS_FOR_HEAD", 0.2)
    good = b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n"

    async def check() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(SmallServer().app, http=heads.LimitedHeads, log_config=None)
            server = uvicorn.Server(config)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            for number, sent in enumerate((b"", good[:30], good + good[:30])):
                async with connected(url) as (reader, writer):
                    writer.write(sent)
                    if number == 2:
                        assert (await read_answer(reader))[0] == 200
                    assert await reader.read() == b""
            server.should_exit = True
            await task

    run(check())
