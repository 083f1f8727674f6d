"""`/v1/batches`: creates, shows, lists and cancels batch jobs."""

import asyncio
import re
from dataclasses import asdict
from typing import Annotated, Any, ClassVar

from fastapi import Query, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from inflight.batches.batch import Batch
from inflight.server.batches.files_endpoint import MAX_SECONDS, file_of, lifetime_of
from inflight.server.batches.jobs import check_parameters, jobs_of, owner_of, page_of
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.strict_model import StrictModel

MAX_METADATA = 16
UNITS = {"m": 60, "h": 3600, "d": 86_400}

TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
"""Statuses with a timestamp."""


class ExpiresAfter(StrictModel):
    """The lifetime of result files."""

    anchor: str
    seconds: int


class BatchRequest(StrictModel):
    """The request for a job."""

    MAY_HAVE_MORE: ClassVar = True

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    output_expires_after: ExpiresAfter | None = None


async def create(body: BatchRequest, request: Request) -> Response:
    """Create a job, which answers a file's requests in the background."""
    jobs = jobs_of(request)
    if body.endpoint not in jobs.urls:
        listed = ", ".join(map(repr, jobs.urls))
        said = f"endpoint is {body.endpoint[:200]!r}; it must be one of {listed}"
        raise ApiError(400, said, param="endpoint")
    seconds, kept = _seconds(body.completion_window), body.output_expires_after
    file = await file_of(body.input_file_id, request, "input_file_id")
    if file.purpose != "batch":
        message = f"{file.id} is a file for {file.purpose!r}; a job reads a file for 'batch'"
        raise ApiError(400, message, param="input_file_id")
    batch = await asyncio.to_thread(
        jobs.ledger.create,
        file.id,
        body.endpoint,
        body.completion_window,
        seconds,
        owner=owner_of(request),
        metadata=body.metadata,
        output_expires_after=None if kept is None else lifetime_of(kept.anchor, kept.seconds, "output_expires_after"),
    )
    jobs.worker.notify()
    return JSONResponse(_shown(batch))


async def list_batches(
    request: Request, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Response:
    """The jobs, the newest first, a page at a time."""
    check_parameters(request, "after", "limit")
    owner = owner_of(request)
    batches = [each for each in await asyncio.to_thread(jobs_of(request).ledger.all) if each.owner == owner]
    shown, fields = page_of(batches, after, limit)
    return JSONResponse({**fields, "data": [_shown(each) for each in shown]})


async def retrieve(batch_id: str, request: Request) -> Response:
    """A job with its progress."""
    return JSONResponse(_shown(await _batch_of(batch_id, request)))


async def cancel(batch_id: str, request: Request) -> Response:
    """Cancel a job; its files keep the answered requests."""
    batch = await _batch_of(batch_id, request)
    if batch.is_finished and batch.status != "cancelled":
        message = f"{batch.id} is {batch.status}; only a job that is not finished can be cancelled"
        raise ApiError(409, message, param="batch_id", code="batch_finished")
    return JSONResponse(_shown(await jobs_of(request).worker.cancel(batch.id)))


async def _batch_of(batch_id: str, request: Request) -> Batch:
    batch = await asyncio.to_thread(jobs_of(request).ledger.get, batch_id)
    if batch is None or batch.owner != owner_of(request):
        raise ApiError(404, f"there is no batch job {batch_id[:200]!r}", param="batch_id", code="batch_not_found")
    return batch


def _seconds(completion_window: str) -> int:
    match = re.fullmatch(r"([1-9]\d{0,5})([mhd])", completion_window)
    seconds = int(match[1]) * UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_SECONDS:
        said = f"completion_window is {completion_window[:100]!r}; it must be a time such as '24h', '30m' or '7d'"
        raise ApiError(400, f"{said}, of at most 366 days", param="completion_window")
    return seconds


def _shown(batch: Batch) -> dict[str, Any]:
    errors = {"object": "list", "data": [asdict(each) for each in batch.errors]} if batch.errors else None
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{status}_at": batch.reached.get(status) for status in TIMES},
        "request_counts": {
            "total": batch.num_lines,
            "completed": batch.num_completed,
            "failed": batch.num_failed,
        },
        "usage": {
            "input_tokens": batch.num_input_tokens,
            "output_tokens": batch.num_output_tokens,
            "total_tokens": batch.num_input_tokens + batch.num_output_tokens,
        },
        "metadata": batch.metadata,
    }
