"""The table of endpoints lists every route, and all its readers follow each row."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import ASGIApp

from inflight.server import endpoints
from inflight.server.batches.answering import answered
from inflight.server.endpoints import ANTHROPIC_ERRORS, ENDPOINTS, Endpoint, add_endpoints, errors_of_path, operation_of
from inflight.server.operations.api_keys import ApiKeys
from inflight.server.wire.api_errors import ApiError, add_error_handlers
from inflight.server.wire.json_route import JsonRoute
from tests.server.serving import RunningServer

PATHS = sorted({each.path.replace("{name:path}", "x") for each in ENDPOINTS})


def ask(app: ASGIApp, path: str, method: str = "POST") -> tuple[int, Any]:
    """The status and the body of an answer."""
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": [], "root_path": ""}

    async def run() -> tuple[int, Any]:
        messages = [message async for together in answered(app, scope, b"{}") for message in together]
        return messages[0]["status"], json.loads(b"".join(each.get("body", b"") for each in messages[1:]) or "null")

    return asyncio.run(run())


def test_a_server_answers_what_the_list_has_and_nothing_else_but_its_page(server: RunningServer) -> None:
    routes = [route for route in server.app.routes if isinstance(route, APIRoute) and "live page" not in route.tags]
    answered_paths = {(route.path, method) for route in routes for method in route.methods}
    listed = {(path, method) for each in ENDPOINTS for path in (each.path, *each.aliases) for method in each.methods}
    assert answered_paths == listed | {(path, method) for path in ("/", "/docs") for method in ("GET", "HEAD")}


@pytest.mark.parametrize("path", PATHS)
def test_an_endpoint_has_one_envelope_wherever_a_request_is_refused(server: RunningServer, path: str) -> None:
    refused = server.http.request("PATCH", path).json()
    assert refused.keys() == ({"type", "error", "request_id"} if path.startswith("/v1/messages") else {"error"})
    if path not in endpoints.OPERATOR_PATHS:
        status, without_key = ask(ApiKeys(["key"]).middleware(server.app), path)
        assert (status, without_key.keys()) == (401, refused.keys())
        assert without_key["error"].keys() == refused["error"].keys()


@pytest.fixture
def with_another(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """An application with one more row in the list."""

    async def another(request: Request) -> Response:
        raise ApiError(413, "no")

    row = Endpoint("/v1/another", another, operation="invoke_agent", errors=ANTHROPIC_ERRORS)
    monkeypatch.setattr(endpoints, "ENDPOINTS", (*ENDPOINTS, row))
    app = FastAPI()
    add_endpoints(app, lambda _: JsonRoute)
    add_error_handlers(app, errors_of_path)
    return app


def test_a_row_is_all_that_applications_errors_and_traces_need(with_another: FastAPI) -> None:
    status, body = ask(with_another, "/v1/another")
    assert (status, body["error"]["type"]) == (413, "request_too_large")
    assert ask(ApiKeys(["key"]).middleware(with_another), "/v1/another")[1]["error"]["type"] == "authentication_error"
    assert operation_of("/v1/another") == "invoke_agent"
    assert operation_of("/v1/embeddings") == "embeddings"
