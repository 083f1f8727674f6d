"""`Database`: the SQLite file of batch jobs, and its folder. Only one process has it at a time.

Committed transactions survive crashes and loss of power: the journal (WAL) is synced each time. Thread-safe;
transactions are exclusive.

`GroupCommit`: writes results that arrive during or shortly after a transaction together in the next one, since
writing takes the GIL from answering.
"""

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inflight.batches.batch import Batch
from inflight.batches.request_lines import Result

SECONDS_BETWEEN = 0.1
"""Seconds between transactions."""


class GroupCommit:
    """Writes the results of one job.

    Args:
        write: writes results, all or none, and returns the updated job; it blocks until they are durable.
        observe: called with the job each time.
    """

    def __init__(self, write: Callable[[list[Result]], Batch], observe: Callable[[Batch], None]) -> None:
        self._write, self._observe = write, observe
        self._waiting: list[tuple[Result, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._is_ending = asyncio.Event()

    async def save(self, result: Result) -> None:
        """Return once the result is durable. Raises `write`'s errors. If cancelled, the result is written
        nevertheless."""
        saved = asyncio.get_running_loop().create_future()
        self._waiting.append((result, saved))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        await saved

    async def finish(self) -> None:
        """Wait until everything is written or has failed. Nothing may be saved afterwards."""
        self._is_ending.set()
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def _write_all(self) -> None:
        while self._waiting:
            together, self._waiting = self._waiting, []
            try:
                batch = await asyncio.to_thread(self._write, [result for result, _ in together])
            except Exception as error:
                for _, saved in together:
                    if not saved.done():
                        saved.set_exception(error)
            else:
                self._observe(batch)
                for _, saved in together:
                    if not saved.done():
                        saved.set_result(None)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_ending.wait(), SECONDS_BETWEEN)
        self._writing = None


NAME = "batches.sqlite"

FORMAT = 1

_SCHEMA = """
CREATE TABLE files (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, content BLOB NOT NULL);
CREATE TABLE batches (number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, status TEXT NOT NULL, content BLOB NOT NULL);
CREATE TABLE lines (
    batch INTEGER NOT NULL,
    number INTEGER NOT NULL,
    offset INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    prefix BLOB NOT NULL,
    num_crashes INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE UNIQUE INDEX by_custom_id ON lines (batch, custom_id);
CREATE INDEX by_prefix ON lines (batch, prefix, number);
CREATE TABLE results (
    place INTEGER PRIMARY KEY,
    batch INTEGER NOT NULL,
    number INTEGER NOT NULL,
    is_error INTEGER NOT NULL,
    line BLOB NOT NULL
);
CREATE UNIQUE INDEX by_line ON results (batch, number);
"""


class DatabaseInUseError(OSError):
    """Another process has the folder."""


class Database:
    """The database in `folder`, which is created if missing.

    Raises:
        DatabaseInUseError: another process has it.
        OSError: the folder cannot be created or used, or its content is not such a database.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.RLock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / NAME
        path.touch(mode=0o600)
        try:
            self._connection = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
            self._open()
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise DatabaseInUseError(f"another process works with the batch jobs in {str(folder)!r}") from error
            raise OSError(f"{str(path)!r} cannot be used: {error}") from error
        sync_folder(folder)

    def _open(self) -> None:
        execute = self._connection.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = FULL")
        (format_,) = execute("PRAGMA user_version").fetchone()
        if format_ == 0:
            self._connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
        elif format_ != FORMAT:
            raise sqlite3.DatabaseError(f"its format is {format_}, and this version knows only {FORMAT}")
        execute("BEGIN IMMEDIATE")  # takes the lock, and keeps it
        execute("COMMIT")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A transaction, durable at the end of the block, and rolled back if it raises.

        Raises `sqlite3.Error`, for example when the disk is full.
        """
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The database as it is, for reading only."""
        with self._lock:
            yield self._connection

    def close(self) -> None:
        """Close it for other processes."""
        with self._lock:
            self._connection.close()


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries."""
    if os.name != "nt":  # not on Windows
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
