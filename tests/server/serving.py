"""A server on a free local port, in its own thread, and clients for tests."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx2
import openai
import uvicorn

from inflight import AsyncLLM
from inflight.batches.batch import Batch
from inflight.contracts.api.outputs import RequestOutput
from inflight.contracts.api.params import SamplingParams
from inflight.server.app import create_app
from inflight.server.live.endpoint import add_live_page
from inflight.server.live.view import LiveView
from inflight.server.serving.observer import EndReason, Observers, RequestObserver
from inflight.server.serving.settings import ServerSettings

HELLO = [{"role": "user", "content": "Tell me a story about a fox."}]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% if not loop.last or add_generation_prompt %};{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
"""A template that shows its input, in characters that tiny models know."""


class RecordedRequests(RequestObserver):
    """Keeps every request that is reported to it."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[int, SamplingParams]] = {}
        self.num_tokens: dict[str, int] = {}
        self.ends: list[tuple[EndReason, RequestOutput | None]] = []
        self.has_ended = threading.Event()
        self.batches: list[Batch] = []
        self._news = threading.Condition()

    def started(self, request_id: str, num_sequences: int, params: SamplingParams, adapter: str | None = None) -> None:
        assert request_id not in self.running
        self.running[request_id] = (num_sequences, params)

    def produced(self, request_id: str, num_new_tokens: int, now: float) -> None:
        assert request_id in self.running
        with self._news:
            self.num_tokens[request_id] = self.num_tokens.get(request_id, 0) + num_new_tokens
            self._news.notify_all()

    def wait_for_tokens(self) -> None:
        """Return once a running request has some tokens."""
        with self._news:
            assert self._news.wait_for(lambda: any(each in self.num_tokens for each in list(self.running)), timeout=60)

    def finished(self, request_id: str, output: RequestOutput | None, reason: EndReason) -> None:
        del self.running[request_id]
        self.ends.append((reason, output))
        self.has_ended.set()

    def batch_changed(self, batch: Batch) -> None:
        self.batches.append(batch)

    def take_reasons(self) -> list[EndReason]:
        """The finish reasons of requests since the last call."""
        reasons = [reason for reason, _ in self.ends]
        self.ends.clear()
        self.has_ended.clear()
        return reasons


class RunningServer:
    """`llm` served over HTTP while the block runs; the engine is stopped with it.

    Attributes:
        url: the server's address.
        http: a client whose paths are relative to the address.
        view: what its live page shows.
        is_ending: what the page is told of the server's end.
    """

    def __init__(self, llm: AsyncLLM, send_buffer: int | None = None, port: int = 0, **settings: Any) -> None:
        self.llm = llm
        self.observer = RecordedRequests()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=2048)
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as the server's event loop sets it
        if send_buffer is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.is_ending = False
        self.view = LiveView(llm, is_ending=lambda: self.is_ending)
        self.app = create_app(llm, ServerSettings(**settings), Observers([self.observer, self.view.history]))
        add_live_page(self.app, self.view)
        config = uvicorn.Config(self.app, http="httptools", log_config=None, timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._listener])))
        self.http = httpx2.Client(base_url=self.url, timeout=100)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.http.close()
        self.is_ending = True
        self._server.should_exit = True
        self._thread.join(60)
        self.view.close()
        assert not self._thread.is_alive()

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def complete(self, **body: Any) -> dict[str, Any]:
        """The answer to a completion request, which must succeed."""
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    @contextmanager
    def connection(self, receive_buffer: int | None = None) -> Iterator[socket.socket]:
        """A bare connection."""
        with socket.socket() as connection:
            if receive_buffer is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            connection.settimeout(60)
            connection.connect(("127.0.0.1", self.port))
            yield connection

    def wait_for_calls(self, number: int) -> None:
        """Return once this number of requests has been sent to the engine and has not ended."""
        end = time.monotonic() + 60
        while sum(call._session is not None for call in list(self.llm._calls.values())) < number:
            assert time.monotonic() < end
            time.sleep(0.001)

    def wait_for_idle_work(self) -> None:
        """Return once the server computes nothing on its own."""
        end = time.monotonic() + 60
        while self.app.state.service.idle_work:
            assert time.monotonic() < end
            time.sleep(0.001)

    def check_idle(self) -> None:
        """Return once nothing runs, and check that nothing was kept."""

        async def check() -> None:
            async with asyncio.timeout(60):
                while True:
                    self.wait_for_idle_work()
                    stats = await self.llm.stats()
                    if not stats.num_running and not stats.num_waiting and not self.observer.running:
                        break
            assert stats.num_blocks_used == 0
            assert not self.llm._calls
            assert not self.app.state.service.running

        asyncio.run(check())


def raw_request(path: str, body: bytes, *, method: str = "POST") -> bytes:
    """A request as sent over the wire."""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode() + b"\r\n" + body


def send(connection: socket.socket, path: str, **body: Any) -> None:
    """Send a request with this body, and leave the answer to be read."""
    connection.sendall(raw_request(path, json.dumps(body).encode()))


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """Read at least up to `mark`, or to the end if the server closes the connection."""
    read = b""
    while mark not in read and (piece := connection.recv(65536)):
        read += piece
    return read
