"""`Addresses`: fetches images and sounds of requests from the hosts, and the folder, that the operator allows.

One parser, yarl's, reads each URL, and aiohttp gets what it has read: there is no second opinion about the host.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from inflight.contracts.api.errors import InvalidRequestError

if TYPE_CHECKING:
    from aiohttp import ClientSession
    from yarl import URL

Address: TypeAlias = "URL | Path"
"""A URL of an allowed host, or an allowed file."""

OPTIONS = {
    "http": "--allowed-media-domains",
    "https": "--allowed-media-domains",
    "file": "--allowed-local-media-path",
}
"""What allows addresses, by scheme."""
NOUNS = {"image": "an image", "audio": "a sound"}
MAX_BYTES = 2**26
MAX_SECONDS = 10.0
MAX_ADDRESSES = 256
"""Of one request."""
MAX_LENGTH = 8192
"""Of an address, in characters."""
AT_ONCE = 8
"""Fetches from one host, or from the folder."""
_HOST = re.compile(r"[a-z0-9._:-]+")


def scheme_of(address: str) -> str:
    """The scheme of a URL, in small letters."""
    return address[:8].partition(":")[0].lower()


class Addresses:
    """Where images and sounds may come from.

    Args:
        domains: hosts of http and https URLs, on any port.
        folder: for file URLs; None: there is none.
        max_bytes: of everything that one request fetches.
        max_seconds: for fetching it, the wait for other requests' fetches included.

    Raises:
        ValueError: a domain is not a host's name or IP address, or the folder does not exist.
    """

    def __init__(
        self,
        domains: Sequence[str] = (),
        folder: str | None = None,
        *,
        max_bytes: int = MAX_BYTES,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self._max_bytes, self._max_seconds = max_bytes, max_seconds
        self._folder = None if folder is None else Path(folder).expanduser().resolve()
        if self._folder is not None and not self._folder.is_dir():
            raise ValueError(f"allowed_local_media_path is {folder!r}, which is not a folder")
        self._hosts = {_host(each): asyncio.Semaphore(AT_ONCE) for each in domains}
        self._files = asyncio.Semaphore(AT_ONCE)

    def allowed(self, address: str) -> Address | None:
        """What to fetch for an address; None: nothing allows it."""
        if not (self._hosts or self._folder) or scheme_of(address) not in OPTIONS or len(address) > MAX_LENGTH:
            return None
        from yarl import URL

        try:
            url = URL(address)
            if url.scheme != "file":
                return url if url.raw_host in self._hosts else None
            if self._folder is not None and url.raw_host in (None, "localhost"):
                path = Path(url.path).resolve()
                return path if path.is_relative_to(self._folder) else None
        except (ValueError, OSError, RuntimeError):  # no URL, no path, a loop of links
            pass
        return None

    async def fetch(self, kinds: Mapping[Address, str]) -> dict[Address, bytes | InvalidRequestError]:
        """Fetch the addresses of one request.

        Args:
            kinds: "image" or "audio", by address.

        Returns:
            The files, or, in one sentence without the path and the query, why there is none.
        """
        if len(kinds) > MAX_ADDRESSES:
            message = f"the prompt has {len(kinds)} images and sounds by address; at most {MAX_ADDRESSES} are accepted"
            return dict.fromkeys(kinds, InvalidRequestError(message))
        import aiohttp

        room = _Room(self._max_bytes)
        async with aiohttp.ClientSession(
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        ) as session:
            fetched = await asyncio.gather(*(self._fetched(each, kinds[each], session, room) for each in kinds))
        return dict(zip(kinds, fetched, strict=True))

    async def _fetched(
        self, address: Address, kind: str, session: ClientSession, room: _Room
    ) -> bytes | InvalidRequestError:
        from aiohttp import ClientError

        host = "the file" if isinstance(address, Path) else address.host
        try:
            async with asyncio.timeout(self._max_seconds):
                if isinstance(address, Path):
                    async with self._files:
                        return room.taken(await asyncio.to_thread(_read, address, room.left))
                async with (
                    self._hosts[address.raw_host or ""],
                    session.get(address, allow_redirects=False) as response,
                ):
                    if response.status != 200:
                        why = ", a redirect, which is not followed" if 300 <= response.status < 400 else ""
                        raise InvalidRequestError(f"the answer has status {response.status}{why}")
                    return b"".join([room.taken(each) async for each in response.content.iter_any()])
        except InvalidRequestError as error:
            cause = str(error)
        except TimeoutError:
            cause = f"it took longer than {self._max_seconds:g} seconds"
        except (ClientError, OSError, ValueError) as error:  # whose text may have the query
            cause = getattr(error, "strerror", None) or f"the connection failed ({type(error).__name__})"
        return InvalidRequestError(f"{NOUNS[kind]} cannot be read: {host}: {cause}")


class _Room:
    """The bytes that a request may still fetch."""

    def __init__(self, num_bytes: int) -> None:
        self.left = self._all = num_bytes

    def taken(self, piece: bytes) -> bytes:
        """The piece, which now counts. Raises `InvalidRequestError` if it is too much."""
        self.left -= len(piece)
        if self.left < 0:
            raise InvalidRequestError(f"what the request fetches has more than {self._all} bytes")
        return piece


def _read(path: Path, most: int) -> bytes:
    """A file, but little more than `most` bytes of it. Raises `OSError`, `InvalidRequestError`."""
    if not path.is_file():
        raise InvalidRequestError("there is no such file")
    with path.open("rb") as file:
        return file.read(max(0, most) + 1)


def _host(domain: str) -> str:
    """A host as yarl writes it. Raises `ValueError`."""
    from yarl import URL

    try:
        host = URL.build(scheme="http", host=domain.removeprefix("[").removesuffix("]")).raw_host or ""
    except ValueError:
        host = ""
    if not _HOST.fullmatch(host):
        raise ValueError(f"allowed_media_domains has {domain!r}; it must be a host, such as 'example.com' or '::1'")
    return host
