"""The live page and its data. Read-only."""

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, FastAPI, Request
from pydantic import Field
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from inflight import __version__
from inflight.server.endpoints import LIVE_PATHS, PAGE_FILES, PAGE_PATHS
from inflight.server.live.history import simulate_recording
from inflight.server.live.view import LiveView
from inflight.server.serving.service import service_of
from inflight.server.serving.streams import Client, EventStream, Write
from inflight.server.wire.api_errors import ApiError
from inflight.server.wire.json_route import JsonRoute, json_response
from inflight.server.wire.strict_model import StrictModel

STATIC = Path(__file__).parent / "static"

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # revalidated each time, and sent only if changed
}

router = APIRouter(route_class=JsonRoute, prefix=LIVE_PATHS, tags=["live page"])


def add_live_page(app: FastAPI, view: LiveView) -> None:
    """Add the page to an application made by `create_app`."""
    app.state.live = view
    app.state.service.keeps_texts = view.shows_texts
    app.include_router(router)
    add_page(app, page)


def add_page(app: FastAPI, page: Callable[..., Awaitable[Response]]) -> None:
    """Add the page's static files to an application.

    Args:
        page: the endpoint that answers with it.
    """
    for path in PAGE_PATHS:
        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount(PAGE_FILES, _Files(directory=STATIC))


async def page() -> Response:
    """The page."""
    return FileResponse(STATIC / "index.html", headers=HEADERS)


class _Files(StaticFiles):
    """The page's files, with its headers."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def _view(request: Request) -> LiveView:
    view: LiveView = request.app.state.live
    return view


@router.get("/events")
async def events(request: Request) -> Response:
    """The engines' state as server-sent events, at most five a second. Each has the whole state."""
    view, settings = _view(request), service_of(request).settings

    async def send(client: Client, write: Write) -> None:
        await write(b"retry: 1000\n\n")
        async with aclosing(view.broadcast.messages()) as messages:
            async for message in messages:
                await write(b"data: " + message + b"\n\n")

    return EventStream(send, replace(settings, request_timeout=None))


@router.get("/about")
async def about(request: Request) -> Response:
    """The server, its model and its configuration."""
    service, view = service_of(request), _view(request)
    info, config = await service.model_info(), service.llm.config
    tokenizer = service.llm.tokenizer
    return json_response(
        {
            "version": __version__,
            "model": service.settings.model_name,
            "info": asdict(info),
            "config": asdict(config),
            "num_engines": service.llm.num_replicas,
            "can_chat": tokenizer is not None and bool(tokenizer.inner.chat_template),
            "shows_texts": view.shows_texts,
            "records_always": view.records_always,
        }
    )


@router.get("/history")
async def history(request: Request) -> Response:
    """The last hour, in pieces of ten seconds."""
    return json_response(_view(request).history.as_dict())


@router.get("/requests/{request_id}")
async def running_request(request_id: str, request: Request) -> Response:
    """A running request, without its text unless the server logs texts."""
    running = service_of(request).running.get(request_id)
    if running is None:
        raise ApiError(404, "no request with this id is running", code="not_running")
    return json_response(_view(request).described(request_id, running))


class WhatIf(StrictModel):
    """Other settings for the recorded minutes; absent ones stay unchanged."""

    engine: Annotated[int, Field(ge=0)] = 0
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | None = None
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    max_prefill_tokens_per_step: Annotated[int, Field(ge=1, le=2**20)] | None = None
    num_blocks: Annotated[int, Field(ge=1, le=2**24)] | None = None
    policy: Literal["fcfs", "priority"] | None = None
    enable_prefix_caching: bool | None = None

    def options(self) -> list[str]:
        """The same for the command line."""
        options: list[str] = []
        for name, value in self.model_dump(exclude={"engine"}, exclude_none=True).items():
            flag = f"--{name.replace('_', '-')}"
            match value:
                case True:
                    options.append(flag)
                case False:
                    options.append(flag.replace("--enable", "--no"))
                case _:
                    options += [flag, str(value)]
        return options


@router.post("/simulate")
async def simulate(body: WhatIf, request: Request) -> Response:
    """Simulate the recorded minutes with these settings and with the current ones."""
    view = _view(request)
    recording = view.recording(body.engine)
    if not recording.is_file() or recording.stat().st_size == 0:
        raise ApiError(409, "nothing is recorded yet: steps are recorded while this page is open", code="not_recorded")
    if view.simulating.locked():
        raise ApiError(429, "another simulation is running; try again", code="simulating", headers={"Retry-After": "2"})
    async with view.simulating:
        own = await simulate_recording(recording, [])
        changed = await simulate_recording(recording, options) if (options := body.options()) else own
    return json_response({"as_set": own, "changed": changed})
