"""`inflight batch`: answers a file of requests, and resumes after any end of the process.

The job's state is in a folder beside the results until they are complete.
"""

import asyncio
import hashlib
import os
import secrets
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from inflight.cli.generate import MOST_IN_FLIGHT
from inflight.cli.help import Command
from inflight.cli.options import (
    adapters_option,
    engine_options,
    engine_values,
    model_option,
    quiet_libraries,
    replicas_option,
    tensor_parallel_option,
)
from inflight.contracts.api.errors import EngineDeadError, InvalidRequestError
from inflight.host.garbage_collection import freeze_loaded_objects

if TYPE_CHECKING:
    from inflight.batches.batch import Batch
    from inflight.batches.database import Database
    from inflight.batches.files import Files, StoredFile
    from inflight.batches.ledger import Ledger
    from inflight.entrypoints.async_llm import AsyncLLM
    from inflight.server.serving.settings import ServerSettings

BYTES_AT_ONCE = 2**20

CHANGE_RESULTS = (
    *("tokenizer", "revision", "load_format", "dtype", "quantization", "quantization_group_size"),
    *("quantization_minima", "quantization_arithmetic", "kv_cache_dtype", "executor", "max_model_len"),
    "tensor_parallel_size",
)
"""Options that must not change when a job is resumed."""


@click.command(cls=Command)
@click.argument("requests", type=click.Path(path_type=Path))
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="The file of the results.")
@click.option(
    "--errors",
    type=click.Path(path_type=Path),
    help="The file of requests that failed or were refused.  [default: OUTPUT with .errors before its suffix]",
)
@click.option("--overwrite", is_flag=True, help="Replace results that are there.")
@click.option("--quiet", "-q", is_flag=True, help="No progress on standard error.")
@model_option
@adapters_option
@replicas_option
@tensor_parallel_option
@engine_options
def batch(
    requests: Path,
    output: Path,
    errors: Path | None,
    overwrite: bool,
    quiet: bool,
    model: str | None,
    **options: Any,
) -> None:
    """Answer the requests in REQUESTS, and lose none of them.

    REQUESTS is a file in OpenAI's batch format: each line has a custom_id, the method POST, a url such as
    /v1/chat/completions, and a body. Results come in the order of the lines.

    Progress is kept in the folder OUTPUT.job until all is done. If the process ends before that, for any reason, the
    same command resumes it.
    """
    folder = output.with_name(output.name + ".job")
    errors = errors or output.with_suffix(f".errors{output.suffix}")
    if not requests.is_file():
        raise InvalidRequestError(f"there is no file {str(requests)!r}")
    _check_places((output, errors), may_exist=overwrite or folder.is_dir())
    quiet_libraries()
    from inflight.batches.files import Files
    from inflight.batches.ledger import Ledger
    from inflight.entrypoints.async_llm import AsyncLLM
    from inflight.server.serving.settings import ANY_NAME, DEMO_MODEL_NAME, ServerSettings

    values = engine_values(options)
    with _opened(folder) as database, _with_resume_hint():
        files = Files(database)
        ledger = Ledger(database, files)
        job = _job(requests, folder, ledger, files, _identity(model, values))
        if not job.is_finished:
            settings = ServerSettings(model_name=model or DEMO_MODEL_NAME, model_aliases=(ANY_NAME,))
            seed = secrets.randbits(63)  # default seeds must not repeat when the job resumes
            job = asyncio.run(_work(AsyncLLM(model, seed=seed, **values), settings, job, ledger, files, quiet))
        if job.status != "failed":  # answered requests are kept in any case
            for file_id, place in ((job.output_file_id, output), (job.error_file_id, errors)):
                if file_id is not None:
                    _hand_over(files.path_of(file_id), place, requests)
                else:  # of results that were replaced
                    place.unlink(missing_ok=True)
            if job.output_file_id is None:
                output.touch()
    finished = folder.with_name(folder.name + ".finished")  # atomically: half of it would look like a job
    shutil.rmtree(finished, ignore_errors=True)
    os.replace(folder, finished)
    shutil.rmtree(finished)
    if job.status == "failed":
        listed = [f"line {each.line}: {each.message}" if each.line else each.message for each in job.errors]
        raise InvalidRequestError("\n".join([f"{str(requests)!r} is wrong, and nothing was answered", *listed]))
    if job.error_file_id is not None:
        print(f"inflight: {job.num_failed} of {job.num_lines} requests failed: see {str(errors)!r}", file=sys.stderr)


def _check_places(places: tuple[Path, Path], may_exist: bool) -> None:
    """Raise `InvalidRequestError` if results cannot be written there, before starting."""
    if places[0].resolve() == places[1].resolve():
        raise InvalidRequestError(f"results and errors cannot be the same file, {str(places[0])!r}")
    for place in places:
        if place.is_dir() or not place.resolve().parent.is_dir():
            raise InvalidRequestError(f"{str(place)!r} is a folder, or would be in one that is not there")
        if place.exists() and not may_exist:
            raise InvalidRequestError(f"{str(place)!r} exists; name another file, or add --overwrite")


@contextmanager
def _with_resume_hint() -> Iterator[None]:
    """On an early end of the block, say that nothing is lost."""
    hint = "run the same command again to resume"
    try:
        yield
    except KeyboardInterrupt:
        print(f"inflight: {hint}", file=sys.stderr)
        raise
    except (OSError, sqlite3.Error, EngineDeadError) as error:
        raise click.ClickException(f"{error}; {hint}") from error


def _identity(model: str | None, values: dict[str, Any]) -> dict[str, str]:
    """The options that results depend on."""
    return {"model": str(model), **{name: str(values[name]) for name in CHANGE_RESULTS if name in values}}


@contextmanager
def _opened(folder: Path) -> "Iterator[Database]":
    """The database of a job. Raises `InvalidRequestError`."""
    from inflight.batches.database import Database

    try:
        database = Database(folder)
    except OSError as error:
        raise InvalidRequestError(str(error)) from error
    with closing(database):
        yield database


def _job(requests: Path, folder: Path, ledger: "Ledger", files: "Files", identity: dict[str, str]) -> "Batch":
    """The job in the folder, or a new one. Raises `InvalidRequestError` if there is one of other requests."""
    found = ledger.all()
    if not found:
        return ledger.create(_copied(requests, files).id, None, "none", metadata=identity)
    job = found[0]
    kept = files.get(job.input_file_id)
    if kept is not None and kept.digest != _digest(requests):
        raise InvalidRequestError(
            f"{str(requests)!r} has changed since this job began; restore it, or delete {str(folder)!r} to start again"
        )
    before = job.metadata or {}
    for name in before | identity:
        if before.get(name) != identity.get(name):
            raise InvalidRequestError(
                f"this job began with {name} {before.get(name, 'at its default')}; go on with that, or delete "
                f"{str(folder)!r} to start again"
            )
    return job


def _copied(requests: Path, files: "Files") -> "StoredFile":
    copy = files.create()
    try:
        with requests.open("rb") as file:
            while data := file.read(BYTES_AT_ONCE):
                copy.write(data)
        return files.add(copy, "", requests.name, "batch")
    except BaseException:
        copy.discard()
        raise


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def _work(
    llm: "AsyncLLM", settings: "ServerSettings", job: "Batch", ledger: "Ledger", files: "Files", quiet: bool
) -> "Batch":
    """Work on the job until it is finished. Raises `ModelError`, `EngineGivenUpError`, `OSError`, `sqlite3.Error`."""
    from inflight.batches.worker import Worker
    from inflight.observe.progress import ProgressBar, seconds_between_drawings
    from inflight.server.app import create_app
    from inflight.server.batches.answering import AppAnswerer
    from inflight.server.endpoints import BATCH_LINES

    bar: ProgressBar | None = None

    def observe(now: "Batch") -> None:
        nonlocal bar, job
        if now.status == "in_progress":
            num_done = now.num_completed + now.num_failed
            if bar is None:
                seconds = seconds_between_drawings()
                bar, job = ProgressBar(0 if quiet else now.num_lines, num_done, seconds_between=seconds), now
            else:
                num_before = job.num_completed + job.num_failed
                bar.count(now.num_output_tokens - job.num_output_tokens, num_done - num_before)
        job = now

    app = create_app(llm, settings)
    worker = Worker(ledger, files, AppAnswerer(app, llm), MOST_IN_FLIGHT, BATCH_LINES, observe)
    try:
        async with app.router.lifespan_context(app):
            freeze_loaded_objects()
            await worker.work_on_next()
    finally:
        if bar is not None:
            bar.close()
    return job


def _hand_over(file: Path, place: Path, requests: Path) -> None:
    """Move a file of results to its place, with the permissions of the requests. It may have been moved before."""
    from inflight.batches.database import sync_folder

    if file.exists():
        shutil.copymode(requests, file)
        os.replace(file, place)
        sync_folder(place.resolve().parent)
