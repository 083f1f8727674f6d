"""Faulty clients: each does something wrong and checks the server's reaction."""

import asyncio
import json
import random
import re
import socket
import struct
from collections import Counter
from contextlib import AsyncExitStack, closing
from typing import Any

from inflight.server.operations import connections
from tests.server.operations.serving import connected, read_answer
from tests.server.under_load.apis import CHAT, COMPLETIONS, ENDLESS, PATHS, PROMPTS, SHORT, Json, question
from tests.server.under_load.served import KEY, MAX_BODY, MAX_REQUESTS, MAX_SEQS, MAX_WAITING, Served


def wire(path: str, body: bytes, *headers: str, key: str = KEY, length: str | None = None) -> bytes:
    """A request as sent over the wire."""
    lines = [f"POST {path} HTTP/1.1", "Host: here", "Connection: close", f"Authorization: Bearer {key}", *headers]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}" if length is None else length]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


class TurnedAwayError(Exception):
    """The server was too busy with other requests; the fault has to be tried again."""


class Faults:
    """Clients that do something wrong and check the server's reaction.

    Attributes:
        logged: for each request id, what the server's log must say: one of these statuses, and why the request ended.
        num_begun: how often each fault was started.
        num_done: how often each fault was completed.
        num_turned_away: the number of requests that were told to retry, by error code.
        unread: connections that are never read.
    """

    def __init__(self, server: Served) -> None:
        self.server = server
        self.logged: dict[str, tuple[set[int], str | None]] = {}
        self.num_begun: Counter[str] = Counter()
        self.num_done: Counter[str] = Counter()
        self.num_turned_away: Counter[str] = Counter()
        self.unread: list[socket.socket] = []

    async def commit(self, name: str, chance: random.Random) -> None:
        """Commit one fault, and repeat it until the server was not too busy for it."""
        turn = self.num_begun[name]
        self.num_begun[name] += 1
        while True:
            try:
                await getattr(self, name)(chance, turn)
            except TurnedAwayError as code:
                self.num_turned_away[str(code)] += 1
                await asyncio.sleep(0.02)  # the time that such a client waits
            else:
                self.num_done[name] += 1
                return

    def check_log(self) -> None:
        """Check that the server's log agrees with what these clients did."""
        lines = {line["request_id"]: line for line in self.server.lines() if "request_id" in line}
        for name, (statuses, reason) in self.logged.items():
            assert lines[name]["status"] in statuses, lines[name]
            assert reason is None or set(lines[name]["finish_reasons"]) == {reason}, lines[name]

    # Each method is a fault; its details may vary from call to call.

    async def leave_in_the_middle(self, chance: random.Random, turn: int) -> None:
        """Leave in the middle of a stream."""
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
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200),  # a TLS client
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
            writer.write(head + b"x" * (connections.MAX_HEAD_BYTES + 1 - len(head)))
            assert (await reader.read()).startswith(b"HTTP/1.1 431")

    async def send_half(self, chance: random.Random, turn: int) -> None:
        """Send half of a request."""
        path, body = _endless(chance, stream=True)
        whole = wire(path, body)
        async with connected(self.server.url) as (_, writer):
            writer.write(whole[: chance.randrange(1, len(whole))])
            await writer.drain()
            _leave(writer, chance)

    async def crowd_the_door(self, chance: random.Random, turn: int) -> None:
        """More clients than admission allows send half a body; those over the limit are refused."""
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
        """Some sequences are accepted before the limit is exceeded, and have to be released."""
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
        """Read slowly, and still get the whole answer."""
        body = {**question(COMPLETIONS, PROMPTS[1], SHORT), "n": 4, "logprobs": 20, "stream": True}
        name, label = self._label({200}, "length")
        reader, writer = await asyncio.open_connection(sock=await self._narrow(), limit=1024)
        with closing(writer):
            writer.write(wire(COMPLETIONS, json.dumps(body).encode(), label))
            await self._accepted(name, reader)
            events = b""
            while piece := await reader.read(1024):
                events += piece
                await asyncio.sleep(0.001)  # this client is slow
        texts = [""] * 4
        for event in re.findall(rb"^data: (\{.*\})\r?$", events, re.MULTILINE):
            for choice in json.loads(event)["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [self.server.right[COMPLETIONS, PROMPTS[1], SHORT]] * 4
        assert b"data: [DONE]" in events

    async def never_read(self, chance: random.Random, turn: int) -> None:
        body = {**question(COMPLETIONS, PROMPTS[1], ENDLESS), "n": 8, "logprobs": 20, "stream": True}
        name, label = self._label({200})  # cut when the server's patience ends; a fast engine is done before, or not
        connection, loop = await self._narrow(), asyncio.get_running_loop()
        await loop.sock_sendall(connection, wire(COMPLETIONS, json.dumps(body).encode(), label))
        if await loop.sock_recv(connection, 12) == b"HTTP/1.1 200":
            self.unread.append(connection)  # and then stop reading
        else:
            connection.close()
            self.logged[name] = ({429}, None)
            raise TurnedAwayError("before the first byte")

    # Shared helpers.

    def _label(self, statuses: set[int], reason: str | None = None) -> tuple[str, str]:
        """An id to search the log for, and the header that carries it."""
        name = f"fault-{len(self.logged)}"
        self.logged[name] = (statuses, reason)
        return name, f"X-Request-Id: {name}"

    async def _accepted(self, name: str, reader: asyncio.StreamReader) -> None:
        """Read the head of an answer, which has to be successful."""
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 429"):
            self.logged[name] = ({429}, None)
            raise TurnedAwayError("when it asked for a stream")
        assert head.startswith(b"HTTP/1.1 200"), head

    async def _refused(self, path: str, body: bytes, status: int, **how: Any) -> Json:
        """The error of a request that gets this status."""
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
        """A connection with a small receive buffer."""
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
    """Leave with a close or a reset."""
    if chance.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
