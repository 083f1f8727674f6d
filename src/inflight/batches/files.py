"""`Files`: uploaded files and files of results, each with its content in the folder and a row in the database.

A file exists once its row does, after its content was synced. Content without a row is left from an interrupted upload,
and is deleted.
"""

import hashlib
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection

import msgspec

from inflight.batches.database import Database, sync_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file's metadata. Times are whole seconds of Unix time.

    Attributes:
        owner: who may see it.
        digest: SHA-256 of its content, in hexadecimal digits.
        expires_at: when it is deleted; None: never.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    digest: str
    created_at: int
    expires_at: int | None = None


class NewFile:
    """A file being written, by one thread at a time; its content is durable once `finish` has returned."""

    def __init__(self, path: Path) -> None:
        self.num_bytes = 0
        self._path = path
        self._digest = hashlib.sha256()
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

    @property
    def id(self) -> str:
        """Its future id."""
        return self._path.name

    @property
    def digest(self) -> str:
        """SHA-256 of the content so far."""
        return self._digest.hexdigest()

    def write(self, data: bytes) -> None:
        """Append to it."""
        self._file.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)

    def finish(self) -> None:
        """Make its content durable."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        sync_folder(self._path.parent)

    def discard(self) -> None:
        """Discard it."""
        self._file.close()
        self._path.unlink(missing_ok=True)


class Files:
    """The files of a database.

    Args:
        clock: gives the seconds of Unix time.

    Raises:
        OSError: their folder cannot be made.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock
        self._folder = database.folder / "files"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(database.folder)
        self._delete_strays()

    def create(self) -> NewFile:
        """Begin a file. Raises `OSError`, also later, when the disk is full."""
        return NewFile(self._folder / f"file-{uuid.uuid4().hex}")

    def store(
        self, new: NewFile, owner: str, filename: str, purpose: str, lifetime: int | None, connection: Connection
    ) -> StoredFile:
        """Add a finished file to the database, within a transaction.

        Args:
            lifetime: seconds for which it is kept; None: forever.
        """
        now = int(self._clock())
        stored = StoredFile(
            id=new.id,
            owner=owner,
            filename=filename,
            purpose=purpose,
            num_bytes=new.num_bytes,
            digest=new.digest,
            created_at=now,
            expires_at=None if lifetime is None else now + lifetime,
        )
        connection.execute("INSERT INTO files (id, content) VALUES (?, ?)", (stored.id, msgspec.json.encode(stored)))
        return stored

    def add(self, new: NewFile, owner: str, filename: str, purpose: str, lifetime: int | None = None) -> StoredFile:
        """Finish a file and store it. Takes as long as the disk does."""
        new.finish()
        with self._database.transaction() as connection:
            return self.store(new, owner, filename, purpose, lifetime, connection)

    def get(self, file_id: str) -> StoredFile | None:
        """A file's metadata; None if it does not exist or has expired."""
        with self._database.reading() as connection:
            row = connection.execute("SELECT content FROM files WHERE id = ?", (file_id,)).fetchone()
        file = None if row is None else msgspec.json.decode(row[0], type=StoredFile)
        return None if file is None or self._is_expired(file) else file

    def all(self) -> list[StoredFile]:
        """All files, the newest first."""
        return [file for file in self._read_all() if not self._is_expired(file)]

    def path_of(self, file_id: str) -> Path:
        """The path of a stored file's content."""
        return self._folder / file_id

    def delete(self, file_id: str) -> bool:
        """Delete a file; return whether it was there."""
        with self._database.transaction() as connection:
            is_deleted = connection.execute("DELETE FROM files WHERE id = ?", (file_id,)).rowcount > 0
        if is_deleted:
            self.path_of(file_id).unlink(missing_ok=True)
        return is_deleted

    def expired(self) -> list[StoredFile]:
        """All expired files that can be deleted."""
        return [file for file in self._read_all() if self._is_expired(file)]

    def _read_all(self) -> list[StoredFile]:
        with self._database.reading() as connection:
            rows = connection.execute("SELECT content FROM files ORDER BY number DESC").fetchall()
        return [msgspec.json.decode(content, type=StoredFile) for (content,) in rows]

    def _is_expired(self, file: StoredFile) -> bool:
        return file.expires_at is not None and file.expires_at <= self._clock()

    def _delete_strays(self) -> None:
        with self._database.reading() as connection:
            known = {file_id for (file_id,) in connection.execute("SELECT id FROM files")}
        for path in self._folder.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)
