"""`ResponseStore`: keeps responses and conversations for a while, so that clients can retrieve and continue them.

The least recently used are dropped once they take too much room. They are in memory, or in a file that the next server
finds.
"""

import contextlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from inflight.server.responses.request import Chat
from inflight.server.serving.settings import IN_MEMORY

MAX_BYTES = 2**26

logger = logging.getLogger("inflight.server")

_BYTES_EACH = 1000
"""Approximate bytes of an entry besides its texts."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response or conversation.

    Attributes:
        answer: the object as it was sent, in JSON.
        chat: of a response, the conversation including this answer, without instructions. (It has all earlier messages,
            so it can be continued after earlier responses are dropped.) Of a conversation, its items.
        num_bytes: its approximate size.
    """

    answer: bytes
    chat: Chat
    num_bytes: int = 0


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log an error of the file, and go on: the answer to the client is sound."""
    try:
        yield
    except sqlite3.Error as error:
        logger.warning("%s: %s", what, error)


class ResponseStore:
    """Responses and conversations by id.

    Args:
        path: of the file.
        max_bytes: most bytes that are kept.

    Attributes:
        running: each `BackgroundRun`, by the id of its response.

    Raises:
        ValueError: the file cannot be used.
    """

    def __init__(self, path: str = IN_MEMORY, max_bytes: int = MAX_BYTES) -> None:
        self.running: dict[str, Any] = {}
        self._max_bytes = max_bytes
        try:
            if path != IN_MEMORY:  # it has prompts and answers
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(path, 1.0, isolation_level=None, check_same_thread=False)
            self._db.executescript(  # no other process may use it: each knows how full it is
                "PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;"
                "CREATE TABLE IF NOT EXISTS entries "
                "(used INTEGER PRIMARY KEY, id TEXT UNIQUE, answer BLOB, chat TEXT, num_bytes INTEGER)"
            )
            (self._num_bytes,) = self._db.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM entries").fetchone()
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"the store of responses {path!r} cannot be used: {error}") from error

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Store a response, or replace it, dropping others if necessary. One that is too large, or that the file cannot
        take, is not stored, and does not replace another."""
        with _logged(f"{response_id} could not be stored"):
            self._put(response_id, response)

    def _put(self, response_id: str, response: StoredResponse) -> None:
        chat = json.dumps(response.chat)
        num_bytes = len(response.answer) + len(chat) + _BYTES_EACH
        if num_bytes > self._max_bytes:
            logger.warning("%s is not stored: it has %d bytes, more than all may have", response_id, num_bytes)
            return
        known = self._db.execute("SELECT num_bytes FROM entries WHERE id = ?", (response_id,)).fetchone()
        self._db.execute(
            "INSERT OR REPLACE INTO entries (id, answer, chat, num_bytes) VALUES (?, ?, ?, ?)",
            (response_id, response.answer, chat, num_bytes),
        )
        self._num_bytes += num_bytes - (known[0] if known else 0)
        oldest = "SELECT id FROM entries ORDER BY used LIMIT 1"
        while self._num_bytes > self._max_bytes and (dropped := self._db.execute(oldest).fetchone()):
            self.delete(*dropped)

    def get(self, response_id: str) -> StoredResponse | None:
        """Return a response, if it is still stored, and mark it as recently used."""
        used = "UPDATE entries SET used = (SELECT MAX(used) FROM entries) + 1 WHERE id = ?"
        with _logged(f"the use of {response_id} could not be noted"):
            self._db.execute(used, (response_id,))
        found = self._db.execute("SELECT answer, chat, num_bytes FROM entries WHERE id = ?", (response_id,)).fetchone()
        return None if found is None else StoredResponse(found[0], tuple(json.loads(found[1])), found[2])

    def delete(self, response_id: str) -> bool:
        """Drop a response; return whether it was stored."""
        dropped = self._db.execute("DELETE FROM entries WHERE id = ? RETURNING num_bytes", (response_id,)).fetchall()
        self._num_bytes -= sum(num_bytes for (num_bytes,) in dropped)
        return bool(dropped)

    def extend(self, conversation_id: str, items: Iterable[Mapping[str, Any]]) -> None:
        """Add items to a conversation, if it is still stored, and the file can take them."""
        with _logged(f"{conversation_id} could not be read"):
            if (known := self.get(conversation_id)) is not None:
                self.put(conversation_id, StoredResponse(known.answer, (*known.chat, *items)))

    def close(self) -> None:
        """Close the file."""
        self._db.close()
