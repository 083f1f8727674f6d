"""API keys: their sources, and authentication. There are no users or quotas: all keys are equal, and a key owns what
was stored with it (`owner` in a request's state).

Keys are compared in constant time: keyed digests of all of them, always to their end.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from inflight.server.endpoints import needs_no_key
from inflight.server.operations.middleware import Middleware, header_of, refuse
from inflight.server.wire.api_errors import ApiError, path_of


def read_api_keys(keys: Iterable[str] = (), file: Path | None = None, environment: str | None = None) -> list[str]:
    """Return all keys from the given sources, without duplicates.

    Args:
        keys: single keys.
        file: a file with one key per line; empty lines and text after a # are ignored.
        environment: the value of an environment variable: keys separated by commas.

    Raises:
        ValueError: the file cannot be read, a source contains no key (which would leave the server open), or an entry
            cannot be a key.
    """
    found = [("a key", key) for key in keys]
    if file is not None:
        found += _of_file(file)
    if environment is not None:
        parts = [part.strip() for part in environment.split(",")]
        if not any(parts):
            raise ValueError("the variable for API keys is set, but has no key in it; unset it to run without keys")
        found += [("a key in the environment", part) for part in parts if part]
    for where, key in found:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            # The entry is not shown: it may be a mistyped key.
            raise ValueError(f"{where} is empty or has spaces or special characters; printable ASCII is accepted")
    return list(dict.fromkeys(key for _, key in found))


def _of_file(file: Path) -> list[tuple[str, str]]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file of API keys {str(file)!r} cannot be read: {error}") from error
    texts = [(number, line.partition("#")[0].strip()) for number, line in enumerate(lines, 1)]
    found = [(f"line {number} of {str(file)!r}", text) for number, text in texts if text]
    if not found:
        raise ValueError(f"the file of API keys {str(file)!r} has no key in it; each line that is not a comment is one")
    return found


class ApiKeys(Middleware):
    """Admits requests with one of the keys, as `Authorization: Bearer` or as `x-api-key`; others get a 401.

    Args:
        keys: at least one key.
        is_open: returns whether a path needs no key.
    """

    SCOPES = ("http", "websocket")

    def __init__(self, keys: Iterable[str], is_open: Callable[[str], bool] = needs_no_key) -> None:
        self._secret = secrets.token_bytes(32)
        self._digests: list[bytes] = []
        self._is_open = is_open
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        """Replace the keys. Raises ValueError if there are none."""
        digests = [self._digest(key.encode()) for key in keys]
        if not digests:
            raise ValueError("there are no API keys; to run without keys, leave them out")
        self._digests = digests

    def accepts(self, key: bytes) -> bool:
        """Whether this is one of the keys."""
        digest, is_one = self._digest(key), False
        for known in self._digests:
            is_one |= hmac.compare_digest(known, digest)
        return is_one

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, "sha256")

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Middleware`."""
        if self._is_open(path_of(scope)):
            await app(scope, receive, send)
            return
        key = _key_of(scope)
        if key is not None and self.accepts(key):
            scope.setdefault("state", {})["owner"] = hashlib.sha256(key).hexdigest()
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            message = "the API key is wrong" if key is not None else "an API key is needed"
            error = ApiError(
                401,
                f"{message}; give one as 'Authorization: Bearer <key>' or 'x-api-key: <key>'",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refuse(scope, receive, send, error)


def _key_of(scope: Scope) -> bytes | None:
    """Return the request's key, if it has one."""
    scheme, _, key = (header_of(scope, b"authorization") or b"").partition(b" ")
    if scheme.lower() == b"bearer" and key.strip():
        return key.strip()
    return header_of(scope, b"x-api-key")
