"""`/v1/files`: input and output files of batch jobs."""

import asyncio
import re
import sqlite3
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from starlette.responses import FileResponse, JSONResponse, Response

from inflight.batches.files import NewFile, StoredFile
from inflight.server.batches.jobs import BatchJobs, check_parameters, jobs_of, owner_of, page_of
from inflight.server.batches.upload import Form, receive_form
from inflight.server.serving.service import settings_of
from inflight.server.wire.api_errors import ApiError

PURPOSES = ("batch",)
FIELDS = {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}
MAX_SECONDS = 366 * 86_400

UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                    },
                }
            }
        },
    }
}


async def upload(request: Request) -> Response:
    """Store a file of requests for a batch job."""
    jobs, settings = jobs_of(request), settings_of(request)
    content_type = request.headers.get("content-type", "")
    try:
        new = await asyncio.to_thread(jobs.files.create)
        try:
            form = await receive_form(content_type, request.stream(), new, "file", settings.max_file_size)
            purpose, lifetime = _checked(form)
        except BaseException:
            new.discard()
            raise
        stored = await asyncio.to_thread(_add, jobs, new, owner_of(request), form.filename or "", purpose, lifetime)
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
