"""`Addresses`: fetches images and sounds of requests from the hosts, and the folder, that the operator allows.

One parser, yarl's, reads each URL, and aiohttp gets what it has read: there is no second opinion about the host.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.step.multimodal import NOUNS

if TYPE_CHECKING:
    from yarl import URL

OPTIONS = dict.fromkeys(("http", "https"), "--allowed-media-domains") | {"file": "--allowed-local-media-path"}
"""What allows addresses, by scheme."""
MAX_ADDRESSES, MAX_LENGTH, AT_ONCE = 256, 8192, 8
"""Addresses of one request; characters of an address; fetches at once from one host, or from the folder."""
_HOST = re.compile(r"[a-z0-9._:-]+")


class Address(NamedTuple):
    """An image, a sound or a video that may be fetched.

    Attributes:
        kind: "image", "audio" or "video".
        turn: limits the fetches from its host, or from the folder.
    """

    kind: str
    place: URL | Path
    turn: asyncio.Semaphore


class Addresses:
    """Where images and sounds may come from.

    Args:
        domains: hosts of http and https URLs, on any port.
        folder: for file URLs; None: there is none.

    Attributes:
        max_bytes: of everything that one request fetches.
        max_seconds: for fetching it, the wait for other requests' fetches included.

    Raises:
        ValueError: a domain is not a host's name or IP address, or the folder does not exist.
    """

    max_bytes = 2**26
    max_seconds = 10.0

    def __init__(self, domains: Sequence[str] = (), folder: str | None = None) -> None:
        self._hosts = {_host(each): asyncio.Semaphore(AT_ONCE) for each in domains}
        self._folder = None if folder is None else Path(folder).expanduser().resolve()
        if folder == "":
            raise ValueError("allowed_local_media_path is empty")
        self._files = asyncio.Semaphore(AT_ONCE)
        if self._folder is not None and not self._folder.is_dir():
            raise ValueError(f"allowed_local_media_path is {folder!r}, which is not a folder")

    def allowed(self, kind: str, url: str) -> Address | None:
        """The address of an image or sound; None: nothing allows it."""
        if not (self._hosts or self._folder) or len(url) > MAX_LENGTH:
            return None
        from yarl import URL

        with suppress(ValueError, OSError, RuntimeError):  # no URL, no path, a loop of links
            parsed = URL(url)
            if parsed.scheme in ("http", "https") and parsed.raw_host in self._hosts:
                return Address(kind, parsed, self._hosts[parsed.raw_host])
            if parsed.scheme == "file" and parsed.raw_host in (None, "localhost"):
                path = Path(parsed.path).resolve()
                return Address(kind, path, self._files) if self._folder in path.parents else None
        return None

    async def fetch(self, addresses: Sequence[Address]) -> dict[Address, bytes | InvalidRequestError]:
        """Fetch the addresses of one request.

        Returns:
            The files, or, in one sentence without the path and the query, why there is none.

        Raises:
            InvalidRequestError: there are too many.
        """
        if (number := len(addresses)) > MAX_ADDRESSES:
            raise InvalidRequestError(f"the prompt has {number} images and sounds by address, above {MAX_ADDRESSES}")
        from aiohttp import ClientError, ClientSession

        left = self.max_bytes

        def take(piece: bytes) -> bytes:
            nonlocal left
            left -= len(piece)
            if left < 0:
                raise OSError(0, f"what the request fetches has more than {self.max_bytes} bytes")
            return piece

        async def fetched(address: Address) -> bytes | InvalidRequestError:
            kind, place, turn = address
            try:
                async with asyncio.timeout(self.max_seconds), turn:
                    if isinstance(place, Path):
                        return take(await asyncio.to_thread(_read, place, max(left, 0) + 1))
                    async with session.get(place, allow_redirects=False) as response:
                        if response.status != 200:
                            why = ", a redirect, which is not followed" if response.status // 100 == 3 else ""
                            raise OSError(0, f"the answer has status {response.status}{why}")
                        return b"".join([take(piece) async for piece in response.content.iter_any()])
            except TimeoutError:
                cause = f"it took longer than {self.max_seconds:g} seconds"
            except (ClientError, OSError, ValueError) as error:  # whose text may have the query
                is_own = type(error) is OSError or isinstance(place, Path)  # others' texts may name an address inside
                known = getattr(error, "strerror", None) if is_own else None
                cause = known or f"the connection failed ({type(error).__name__})"
            return InvalidRequestError(f"{NOUNS[kind]} cannot be read: {getattr(place, 'host', 'the file')}: {cause}")

        # Without `trust_env`, no proxy of the environment is used.
        async with ClientSession(headers={"Accept-Encoding": "identity"}, auto_decompress=False) as session:
            different = list(dict.fromkeys(addresses))
            return dict(zip(different, await asyncio.gather(*map(fetched, different)), strict=True))


def _read(path: Path, most: int) -> bytes:
    """The first `most` bytes of a file. Raises `OSError`."""
    if not path.is_file():
        raise OSError(0, "there is no such file")
    with path.open("rb") as file:
        return file.read(most)


def _host(domain: str) -> str:
    """A host as yarl writes it. Raises `ValueError`."""
    from yarl import URL

    with suppress(ValueError):
        host = URL.build(scheme="http", host=domain.removeprefix("[").removesuffix("]")).raw_host
        if host is not None and _HOST.fullmatch(host):
            return host
    raise ValueError(f"allowed_media_domains has {domain!r}; it must be a host, such as 'example.com' or '::1'")
