"""A client of OpenAI-compatible servers: lists models, and sends requests whose answers are streamed.

Splits event streams into chunks, and reports failures in one line. It decodes only the needed parts of a chunk, so a
thousand streams at once cost little of one core.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

T = TypeVar("T")
MAX_REASON = 200
"""Most characters of a server's own error message that are passed on."""


class ServerError(Exception):
    """A server could not be reached, refused, or aborted its answer; the message says which, in one line.

    Attributes:
        status: the HTTP status, if the answer's status was the error.
    """

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class Card(msgspec.Struct):
    """What a server tells of a model; modalities are None where it does not tell."""

    id: str
    input_modalities: list[str] | None = None


class Cards(msgspec.Struct):
    """What a server tells of its models."""

    data: list[Card]


class Delta(msgspec.Struct):
    """A delta of a chat's message. For reasoning, servers use one of two names."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


class Choice(msgspec.Struct):
    """A delta of one of the answers."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class Usage(msgspec.Struct):
    """The server's count of tokens."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(msgspec.Struct):
    """One event of a stream."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw()

    @property
    def text(self) -> str:
        """The delta of the answer."""
        return "".join(each.text or (each.delta and each.delta.content) or "" for each in self.choices or ())

    @property
    def reasoning(self) -> str:
        """The delta of the reasoning."""
        deltas = [each.delta for each in self.choices or () if each.delta is not None]
        return "".join(delta.reasoning_content or delta.reasoning or "" for delta in deltas)

    @property
    def carries_tokens(self) -> bool:
        """Whether the chunk contains a part of the answer; a chat's first chunk often contains only the role."""
        for choice in self.choices or ():
            delta = choice.delta
            if choice.text or choice.token_ids:
                return True
            if delta is not None and (
                delta.content or delta.reasoning_content or delta.reasoning or bytes(delta.tool_calls) not in NOTHING
            ):
                return True
        return False

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ends with this chunk, if it does."""
        return next((choice.finish_reason for choice in self.choices or () if choice.finish_reason), None)


NOTHING = (b"", b"null", b"[]")
"""Raw values of fields that are absent or empty."""

_decode = msgspec.json.Decoder(Chunk).decode


class EventReader:
    """Cuts server-sent events into chunks. Comments (keep-alive) and fields other than `data` are ignored.

    An event's data is assumed to be one line, as all such servers write it.

    Attributes:
        is_done: whether the server has sent the final event.
        failure: an error event, or an event that cannot be read; events after it are ignored.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.failure: ServerError | None = None
        self._rest = b""

    def feed(self, data: bytes) -> list[Chunk]:
        """Add `data` and return the chunks that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        chunks = []
        for line in lines:
            if self.failure is not None or not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.is_done = True
                continue
            try:
                chunk = _decode(payload)
            except msgspec.MsgspecError:
                self.failure = ServerError(f"an event cannot be read: {_shortened(payload)}")
                continue
            if bytes(chunk.error) in NOTHING:
                chunks.append(chunk)
            else:
                self.failure = ServerError(f"error in the stream: {_words(payload)}")
        return chunks


class OpenAIClient:
    """A client of one server, with one connection per concurrent request. An async context manager.

    Args:
        base_url: such as "http://127.0.0.1:8000", with or without "/v1".
        api_key: sent as a bearer token.

    Raises:
        ValueError: the address is not a URL.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"the address is {base_url!r}; it must be a URL such as http://127.0.0.1:8000")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # A compressed stream would arrive late and in lumps.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        # Each request gets its own connection: a reused one might be closed by the server at that very moment.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        unlimited = aiohttp.ClientTimeout(total=None, sock_connect=None, sock_read=None)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=unlimited)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def models(self) -> list[str]:
        """Return the names of the server's models. Raises `ServerError`."""
        return [card.id for card in (await self._get("/v1/models", Cards)).data]

    async def card(self, model: str) -> Card:
        """Return what the server tells of a model. Raises `ServerError`."""
        return await self._get(f"/v1/models/{quote(model)}", Card)

    async def _get(self, path: str, kind: type[T]) -> T:
        async with self._request("GET", path) as response:
            content = await response.read()
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError:
            raise ServerError(f"{path} cannot be read: {_shortened(content)}") from None

    async def first_model(self) -> str:
        """Return the name of the first model. Raises `ServerError` if there is none."""
        models = await self.models()
        if not models:
            raise ServerError("the server names no model at /v1/models; give its name")
        return models[0]

    async def stream(self, path: str, body: bytes) -> AsyncGenerator[list[Chunk], None]:
        """Send a request and yield the chunks of its answer, as lists of chunks that arrived together.

        Args:
            path: such as "/v1/completions".
            body: JSON that contains `"stream": true`.

        Raises:
            ServerError: the server cannot be reached or refuses, or the answer ends before it is finished.
        """
        events, is_finished = EventReader(), False
        async with self._request("POST", path, body) as response:
            async for data in response.content.iter_any():
                chunks = events.feed(data)
                is_finished = is_finished or any(chunk.finish_reason is not None for chunk in chunks)
                if chunks:
                    yield chunks
                if events.failure is not None:
                    raise events.failure
            if not is_finished and not events.is_done:
                raise ServerError(f"the answer ended unfinished ({response.content_type})")

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: bytes | None = None
    ) -> "AsyncGenerator[aiohttp.ClientResponse, None]":
        if self._session is None:
            raise RuntimeError("the client is not open; use it with `async with`")
        with _failures_in_one_line():
            async with self._session.request(method, self.base_url + path, data=body) as response:
                if response.status != 200:
                    reason = _words(await response.read())
                    raise ServerError(f"HTTP {response.status}: {reason}", response.status)
                yield response


@contextmanager
def _failures_in_one_line() -> Iterator[None]:
    """Turn connection errors into `ServerError`."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)  # whose text has the address as a tuple
        raise ServerError(f"cannot connect: {'connection refused' if refused else error.strerror or error}") from None
    except aiohttp.ClientPayloadError:
        raise ServerError("the connection broke during the answer") from None
    except (aiohttp.ServerDisconnectedError, ConnectionError):
        raise ServerError("the server closed the connection without an answer") from None
    except aiohttp.ClientOSError as error:
        raise ServerError(f"the connection broke: {error.strerror or error}") from None
    except aiohttp.ClientError as error:
        raise ServerError(f"{type(error).__name__}: {error}") from None


def _words(content: bytes) -> str:
    """Return an error body's message, wherever the server put it."""
    try:
        found: Any = msgspec.json.decode(content)
    except msgspec.MsgspecError:
        found = content.decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return _shortened(found if isinstance(found, str) else msgspec.json.encode(found).decode())


def _shortened(text: str | bytes) -> str:
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    text = " ".join(text.split())
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"
