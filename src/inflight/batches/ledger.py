"""`Ledger`: the durable progress of each batch job, line by line.

A result is recorded atomically, once per line, and counted in the same transaction. When a job is finalized, its
results move to its files, in the order of its lines; until the files exist, everything stays. So a job resumes after a
crash at any moment from the last transaction.
"""

import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from inflight.batches.batch import UNFINISHED, Batch, LineError, Status
from inflight.batches.database import Database
from inflight.batches.files import Files
from inflight.batches.request_lines import RequestLine, Result, line_of_error, request_of

PAGE_LINES, PAGE_BYTES = 256, 2**23
"""Most lines, and approximate bytes, read at once."""

ROWS_AT_ONCE = 1000
"""Rows read or deleted per lock of the database."""

OUTPUT = "batch_output"
"""The `purpose` of result files."""


@dataclass(frozen=True, slots=True)
class Work:
    """An unanswered request of a batch job."""

    number: int
    custom_id: str
    prefix: bytes
    url: str
    body: bytes


class Ledger:
    """The batch jobs of a database. All methods block while the disk works.

    Args:
        clock: gives the seconds of Unix time.
    """

    def __init__(self, database: Database, files: Files, clock: Callable[[], float] = time.time) -> None:
        self._database, self._files, self._clock = database, files, clock

    # ------------------------------------------------------------------------------------- jobs

    def create(
        self,
        input_file_id: str,
        endpoint: str | None,
        completion_window: str,
        seconds: int | None = None,
        *,
        owner: str = "",
        metadata: dict[str, str] | None = None,
        output_expires_after: int | None = None,
    ) -> Batch:
        """Begin a job.

        Args:
            seconds: after which unanswered lines are cancelled; None: never.
        """
        now = int(self._clock())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            owner=owner,
            input_file_id=input_file_id,
            endpoint=endpoint,
            completion_window=completion_window,
            created_at=now,
            expires_at=None if seconds is None else now + seconds,
            output_expires_after=output_expires_after,
            metadata=metadata,
        )
        with self._database.transaction() as connection:
            row = (batch.id, batch.status, msgspec.json.encode(batch))
            connection.execute("INSERT INTO batches (id, status, content) VALUES (?, ?, ?)", row)
        return batch

    def get(self, batch_id: str) -> Batch | None:
        """A job's current state."""
        with self._database.reading() as connection:
            row = connection.execute("SELECT content FROM batches WHERE id = ?", (batch_id,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=Batch)

    def all(self) -> list[Batch]:
        """All jobs, the newest first."""
        with self._database.reading() as connection:
            rows = connection.execute("SELECT content FROM batches ORDER BY number DESC").fetchall()
        return [msgspec.json.decode(content, type=Batch) for (content,) in rows]

    def next_unfinished(self) -> Batch | None:
        """The oldest job that is not finished."""
        marks = ", ".join("?" * len(UNFINISHED))
        query = f"SELECT content FROM batches WHERE status IN ({marks}) ORDER BY number LIMIT 1"
        with self._database.reading() as connection:
            row = connection.execute(query, UNFINISHED).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=Batch)

    def cancel(self, batch_id: str) -> Batch:
        """Cancel a job's unanswered requests, unless it is finished or about to be. Raises `KeyError` for an unknown
        job."""
        with self._database.transaction() as connection:
            number, batch = _read(connection, batch_id)
            if batch.status in ("validating", "in_progress"):
                batch = self._write(connection, number, replace(batch, ends_as="cancelled"), "cancelling")
        return batch

    def expire(self, batch_id: str) -> Batch:
        """Expire a job's unanswered requests."""
        with self._database.transaction() as connection:
            number, batch = _read(connection, batch_id)
            return self._write(connection, number, replace(batch, ends_as="expired"), "finalizing")

    def advance(self, batch_id: str, to: Status) -> Batch:
        """Set a job's status, unless it was cancelled meanwhile."""
        with self._database.transaction() as connection:
            number, batch = _read(connection, batch_id)
            if batch.status == "cancelling":
                return batch
            return self._write(connection, number, batch, to)

    def fail(self, batch_id: str, errors: Sequence[LineError]) -> Batch:
        """End a job whose file is invalid."""
        with self._database.transaction() as connection:
            number, batch = _read(connection, batch_id)
            return self._write(connection, number, replace(batch, errors=tuple(errors), num_lines=0), "failed")

    # ------------------------------------------------------------------------------------- lines

    def add_lines(self, batch_id: str, lines: Sequence[RequestLine]) -> list[LineError]:
        """Add requests to a job that is being validated; return an error for each whose `custom_id` is in use."""
        with self._database.transaction() as connection:
            number, batch = _read(connection, batch_id)
            rows = [(number, each.number, each.offset, each.num_bytes, each.custom_id, each.prefix) for each in lines]
            num_added = connection.executemany(
                "INSERT OR IGNORE INTO lines (batch, number, offset, num_bytes, custom_id, prefix) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                rows,
            ).rowcount
            self._write(connection, number, replace(batch, num_lines=batch.num_lines + num_added))
            if num_added == len(lines):
                return []
            query = "SELECT number FROM lines WHERE batch = ? AND custom_id = ?"
            errors = []
            for each in lines:
                (first,) = connection.execute(query, (number, each.custom_id)).fetchone()
                if first != each.number:
                    said = f"the custom_id {each.custom_id[:100]!r} is that of line {first}"
                    errors.append(LineError("duplicate_custom_id", said, each.number, "custom_id"))
        return errors

    def remove_lines(self, batch_id: str) -> None:
        """Remove a job's lines and results."""
        while self._remove_some(batch_id):
            pass

    def _remove_some(self, batch_id: str) -> bool:
        with self._database.transaction() as connection:
            number, batch = _read(connection, batch_id)
            if not batch.is_finished:
                self._write(connection, number, replace(batch, num_lines=0))
            num_removed = 0
            for table in ("results", "lines"):
                some = f"SELECT number FROM {table} WHERE batch = ? LIMIT {ROWS_AT_ONCE}"
                query = f"DELETE FROM {table} WHERE batch = ? AND number IN ({some})"
                num_removed += connection.execute(query, (number, number)).rowcount
        return num_removed > 0

    def work(self, batch: Batch, num_crashes: int) -> Iterator[list[Work]]:
        """A job's unanswered requests, in order of work, in pages.

        Args:
            num_crashes: only lines that were running in this many crashes of the engine.

        Raises `OSError` if the job's file cannot be read.
        """
        query = """
            SELECT l.number, l.offset, l.num_bytes, l.custom_id, l.prefix FROM lines AS l INDEXED BY by_prefix
            WHERE l.batch = ? AND (l.prefix, l.number) > (?, ?) AND l.num_crashes = ?
            AND NOT EXISTS (SELECT 1 FROM results AS r WHERE r.batch = l.batch AND r.number = l.number)
            ORDER BY l.prefix, l.number LIMIT ?
        """
        last: tuple[bytes, int] = (b"", 0)
        with self._files.path_of(batch.input_file_id).open("rb") as file:
            while True:
                with self._database.reading() as connection:
                    number, _ = _read(connection, batch.id)
                    rows = connection.execute(query, (number, *last, num_crashes, PAGE_LINES)).fetchall()
                page, num_left = list[Work](), PAGE_BYTES
                for line_number, offset, num_bytes, custom_id, prefix in rows:
                    if num_left <= 0:
                        break
                    file.seek(offset)
                    page.append(Work(line_number, custom_id, prefix, *request_of(file.read(num_bytes))))
                    num_left -= num_bytes
                if not page:
                    return
                yield page
                last = page[-1].prefix, page[-1].number

    def note_crash(self, batch_id: str, number: int) -> None:
        """Count a crash of the engine for a running line."""
        with self._database.transaction() as connection:
            batch_number, _ = _read(connection, batch_id)
            where = (batch_number, number)
            connection.execute("UPDATE lines SET num_crashes = num_crashes + 1 WHERE batch = ? AND number = ?", where)

    def add_results(self, batch_id: str, results: Sequence[Result]) -> Batch:
        """Add results atomically; they are durable when this returns. Raises `sqlite3.Error`."""
        with self._database.transaction() as connection:
            number, batch = _read(connection, batch_id)
            connection.executemany(
                "INSERT INTO results (batch, number, is_error, line) VALUES (?, ?, ?, ?)",
                [(number, each.number, each.is_error, each.line) for each in results],
            )
            num_failed = sum(each.is_error for each in results)
            batch = replace(
                batch,
                num_completed=batch.num_completed + len(results) - num_failed,
                num_failed=batch.num_failed + num_failed,
                num_input_tokens=batch.num_input_tokens + sum(each.num_input_tokens for each in results),
                num_output_tokens=batch.num_output_tokens + sum(each.num_output_tokens for each in results),
            )
            return self._write(connection, number, batch)

    # ------------------------------------------------------------------------------------- the end

    def finalize(self, batch_id: str, code: str, message: str) -> Batch:
        """Write the results of a job to its files, in the order of its lines, and end it.

        Args:
            code, message: the error of requests that were not answered.

        Raises `OSError` or `sqlite3.Error` if the disk is full; then nothing has changed.
        """
        outputs, errors = self._files.create(), self._files.create()
        try:
            num_unanswered = 0
            for custom_id, is_error, line in self._in_order(batch_id):
                num_unanswered += line is None
                written = line_of_error(custom_id, code, message) if line is None else line
                (errors if is_error else outputs).write(written + b"\n")
            for new in (outputs, errors):
                new.finish() if new.num_bytes else new.discard()
        except BaseException:
            outputs.discard()
            errors.discard()
            raise
        # Files unknown to the database are deleted when it is next opened.
        with self._database.transaction() as connection:
            number, batch = _read(connection, batch_id)
            file_ids: list[str | None] = []
            for new, kind in ((outputs, "output"), (errors, "error")):
                if new.num_bytes:
                    name, lifetime = f"{batch.id}_{kind}.jsonl", batch.output_expires_after
                    self._files.store(new, batch.owner, name, OUTPUT, lifetime, connection)
                file_ids.append(new.id if new.num_bytes else None)
            batch = replace(
                batch,
                output_file_id=file_ids[0],
                error_file_id=file_ids[1],
                num_failed=batch.num_failed + num_unanswered,
            )
            return self._write(connection, number, batch, batch.ends_as)

    def _in_order(self, batch_id: str) -> Iterator[tuple[str, bool, bytes | None]]:
        """For each line its `custom_id`, whether it is an error, and its result; None: it has none."""
        query = """
            SELECT l.number, l.custom_id, coalesce(r.is_error, 1), r.line FROM lines AS l
            LEFT JOIN results AS r ON r.batch = l.batch AND r.number = l.number
            WHERE l.batch = ? AND l.number > ? ORDER BY l.number LIMIT ?
        """
        last = 0
        while True:
            with self._database.reading() as connection:
                number, _ = _read(connection, batch_id)
                rows = connection.execute(query, (number, last, ROWS_AT_ONCE)).fetchall()
            if not rows:
                return
            for last, custom_id, is_error, line in rows:  # noqa: B007
                yield custom_id, bool(is_error), line

    def sweep(self) -> None:
        """Remove the rows of finished jobs, and expired files."""
        marks = ", ".join("?" * len(UNFINISHED))
        query = f"""
            SELECT id FROM batches AS b WHERE status NOT IN ({marks})
            AND EXISTS (SELECT 1 FROM lines AS l WHERE l.batch = b.number)
        """
        with self._database.reading() as connection:
            finished = [batch_id for (batch_id,) in connection.execute(query, UNFINISHED)]
        for batch_id in finished:
            self.remove_lines(batch_id)
        for file in self._files.expired():
            if not self.is_needed(file.id):
                self._files.delete(file.id)

    def is_needed(self, file_id: str) -> bool:
        """Whether a file is the input of a job that is not finished."""
        return any(each.input_file_id == file_id and not each.is_finished for each in self.all())

    def _write(self, connection: sqlite3.Connection, number: int, batch: Batch, status: Status | None = None) -> Batch:
        """Write a job's row, with a new status if there is one."""
        if status is not None:
            batch = replace(batch, status=status, reached={**batch.reached, status: int(self._clock())})
        row = (batch.status, msgspec.json.encode(batch), number)
        connection.execute("UPDATE batches SET status = ?, content = ? WHERE number = ?", row)
        return batch


def _read(connection: sqlite3.Connection, batch_id: str) -> tuple[int, Batch]:
    """A job and the number of its row. Raises `KeyError` if there is none."""
    row = connection.execute("SELECT number, content FROM batches WHERE id = ?", (batch_id,)).fetchone()
    if row is None:
        raise KeyError(batch_id)
    return row[0], msgspec.json.decode(row[1], type=Batch)
