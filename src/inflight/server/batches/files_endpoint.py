"""`/v1/files`: input and output files of batch jobs.

`receive_form`: streams a form's file to disk, so that its size costs no memory.
"""

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Query, Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.responses import FileResponse, JSONResponse, Response

from inflight.batches.files import NewFile, StoredFile
from inflight.server.batches.jobs import BatchJobs, check_parameters, jobs_of, owner_of, page_of
from inflight.server.serving.service import settings_of
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.forms import FILE, form

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks


MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16

SECONDS_OF_SILENCE = 30.0
"""Seconds that a client may pause."""


@dataclass(slots=True)
class Form:
    """A received form.

    Attributes:
        filename: the client's name of the file; None: no file.
    """

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


async def receive_form(
    content_type: str, chunks: AsyncIterator[bytes], file: NewFile, file_field: str, max_bytes: int
) -> Form:
    """Receive a form, and write its file's content.

    Args:
        content_type: the request's header.
        max_bytes: the most that the file may have.

    Raises:
        ApiError: the form is invalid, the file is too large, or the client is too slow.
        OSError: the disk is full.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or b"boundary" not in options:
        shown = content_type[:100]
        raise ApiError(415, f"the content type is {shown!r}; a file is sent as multipart/form-data", code="no_form")
    parts = _Parts(file_field, max_bytes)
    parser = MultipartParser(options[b"boundary"], parts.callbacks())
    try:
        async for chunk in _not_silent(chunks):
            parser.write(chunk)
            if parts.arrived:
                await asyncio.to_thread(file.write, b"".join(parts.arrived))
                parts.arrived.clear()
        parser.finalize()
    except FormParserError as error:
        raise ApiError(400, f"the form cannot be read: {error}") from error
    if not parts.is_complete:
        raise ApiError(400, "the form ends before its last boundary")
    return parts.form


async def _not_silent(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    while True:
        try:
            async with asyncio.timeout(SECONDS_OF_SILENCE):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError:
            message = f"nothing of the file came for {SECONDS_OF_SILENCE:g} seconds"
            raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None
        yield chunk  # processing has no timeout


class _Parts:
    """Takes the parts of a form from the parser.

    Attributes:
        arrived: pieces of the file to write.
    """

    def __init__(self, file_field: str, max_bytes: int) -> None:
        self.form, self.arrived, self.is_complete = Form(), list[bytes](), False
        self._file_field, self._max_bytes, self._num_bytes = file_field, max_bytes, 0
        self._header, self._value, self._disposition = b"", b"", b""
        self._name, self._content, self._is_file = "", b"", False

    def callbacks(self) -> "MultipartCallbacks":
        """The parser's callbacks."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._take_header,
            "on_header_value": self._take_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._take_data,
            "on_part_end": self._end,
            "on_end": self._complete,
        }

    def _begin(self) -> None:
        self._disposition, self._content, self._is_file = b"", b"", False

    def _take_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name == self._file_field:
            if self.form.filename is not None:
                raise ApiError(400, f"the form has more than one {self._file_field}", param=self._file_field)
            self._is_file = True
            self.form.filename = options.get(b"filename", b"").decode(errors="replace") or "unnamed"

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            self._content += data[start:end]
            if len(self._content) > MAX_FIELD_BYTES:
                raise ApiError(400, f"{self._name[:100]} has more than {MAX_FIELD_BYTES} bytes")
            return
        self._num_bytes += end - start
        if self._num_bytes > self._max_bytes:
            message = f"the file has more than {self._max_bytes} bytes, the most that this server takes"
            raise ApiError(413, message, param=self._file_field, code="file_too_large", headers={"Connection": "close"})
        self.arrived.append(data[start:end])

    def _end(self) -> None:
        if not self._is_file:
            self.form.fields[self._name] = self._content.decode(errors="replace")
            if len(self.form.fields) > MAX_FIELDS:
                raise ApiError(400, f"the form has more than {MAX_FIELDS} fields")

    def _complete(self) -> None:
        self.is_complete = True


PURPOSES = ("batch",)
FIELDS = {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}
MAX_SECONDS = 366 * 86_400

UPLOAD = form(file=FILE, purpose={"type": "string", "enum": list(PURPOSES)})


async def upload(request: Request) -> Response:
    """Store a file of requests for a batch job."""
    jobs, settings = jobs_of(request), settings_of(request)
    content_type = request.headers.get("content-type", "")
    try:
        new = await asyncio.to_thread(jobs.files.create)
        try:
            received = await receive_form(content_type, request.stream(), new, "file", settings.max_file_size)
            purpose, lifetime = _checked(received)
        except BaseException:
            new.discard()
            raise
        stored = await asyncio.to_thread(_add, jobs, new, owner_of(request), received.filename or "", purpose, lifetime)
    except (OSError, sqlite3.Error) as error:
        raise ApiError(507, f"the file cannot be stored: {error}", code="storage_failed") from error
    return JSONResponse(_shown(stored))


def _add(jobs: BatchJobs, new: NewFile, owner: str, name: str, purpose: str, lifetime: int | None) -> StoredFile:
    """Store a file, even if its client has disconnected."""
    try:
        return jobs.files.add(new, owner, name, purpose, lifetime)
    except BaseException:
        new.discard()
        raise


async def list_files(
    request: Request,
    purpose: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The files, a page at a time."""
    check_parameters(request, "purpose", "after", "limit", "order")
    owner = owner_of(request)
    files = [
        each
        for each in await asyncio.to_thread(jobs_of(request).files.all)
        if each.owner == owner and purpose in (None, each.purpose)
    ]
    shown, fields = page_of(files if order == "desc" else files[::-1], after, limit)
    return JSONResponse({**fields, "data": [_shown(each) for each in shown]})


async def retrieve(file_id: str, request: Request) -> Response:
    """A file's metadata."""
    return JSONResponse(_shown(await file_of(file_id, request)))


async def content(file_id: str, request: Request) -> Response:
    """A file's content."""
    file, jobs = await file_of(file_id, request), jobs_of(request)
    return FileResponse(jobs.files.path_of(file.id), media_type="application/jsonl")


async def delete(file_id: str, request: Request) -> Response:
    """Delete a file."""
    file, jobs = await file_of(file_id, request), jobs_of(request)
    if not await asyncio.to_thread(_delete, jobs, file.id):
        message = f"{file.id} is the input of a batch job that is not finished; cancel that first"
        raise ApiError(409, message, param="file_id", code="file_in_use")
    return JSONResponse({"id": file.id, "object": "file", "deleted": True})


def _delete(jobs: BatchJobs, file_id: str) -> bool:
    if jobs.ledger.is_needed(file_id):
        return False
    jobs.files.delete(file_id)
    return True


async def file_of(file_id: str, request: Request, param: str = "file_id") -> StoredFile:
    """A file of the client's. Raises `ApiError` if there is none."""
    file = await asyncio.to_thread(jobs_of(request).files.get, file_id)
    if file is None or file.owner != owner_of(request):
        raise ApiError(404, f"there is no file {file_id[:200]!r}", param=param, code="file_not_found")
    return file


def lifetime_of(anchor: Any, seconds: Any, param: str) -> int:
    """The seconds of a field such as `expires_after`. Raises `ApiError`."""
    if anchor != "created_at":
        raise ApiError(400, f"{param}.anchor is {str(anchor)[:100]!r}; it must be 'created_at'", param=param)
    if not re.fullmatch(r"[1-9]\d{0,8}", str(seconds)) or int(seconds) > MAX_SECONDS:
        said = f"{param}.seconds is {str(seconds)[:100]!r}; it must be an integer from 1 to {MAX_SECONDS}"
        raise ApiError(400, said, param=param)
    return int(seconds)


def _checked(form: Form) -> tuple[str, int | None]:
    """The purpose and lifetime of an uploaded file."""
    if unknown := sorted(form.fields.keys() - FIELDS):
        raise ApiError(400, f"there is no field {unknown[0][:100]!r}", param=unknown[0][:100], code="unknown_field")
    if form.filename is None:
        raise ApiError(400, "file is missing", param="file", code="missing_required_parameter")
    purpose = form.fields.get("purpose")
    if purpose not in PURPOSES:
        accepted = " or ".join(map(repr, PURPOSES))
        raise ApiError(400, f"purpose is {purpose!r}; this server keeps files for {accepted} only", param="purpose")
    anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return purpose, None
    return purpose, lifetime_of(anchor, seconds, "expires_after")


def _shown(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
