"""The access log: one line per HTTP request, with token counts and finish reasons, and with text only on demand.

`logs` formats the lines. Endpoints' reports are matched to their HTTP request by context variables.
"""

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send

from inflight.contracts.api.outputs import RequestOutput
from inflight.server.endpoints import is_work
from inflight.server.operations.middleware import Middleware, model_of, run_watched
from inflight.server.serving.observer import EndReason, RequestObserver
from inflight.server.wire.api_errors import path_of

logger = logging.getLogger("inflight.access")


@dataclass(slots=True)
class _Generated:
    """The sum of all generation for one HTTP request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    texts: list[dict[str, Any]] = field(default_factory=list)


_generated: ContextVar[_Generated | None] = ContextVar("_generated", default=None)


class AccessLog(Middleware, RequestObserver):
    """Writes the lines. It is a middleware, and must be registered as the requests' observer, too.

    Args:
        with_text: whether the lines contain prompts and answers.
    """

    def __init__(self, *, with_text: bool = False) -> None:
        self._with_text = with_text

    def produced(self, request_id: str, num_new_tokens: int, now: float) -> None:
        """Count new tokens, even if their request fails later."""
        generated = _generated.get()
        if generated is not None:
            generated.completion_tokens += num_new_tokens

    def finished(self, request_id: str, output: RequestOutput | None, reason: EndReason) -> None:
        """Record the end of a request, or its refusal."""
        generated = _generated.get()
        if generated is None:
            return
        if output is None:
            generated.finish_reasons.append(reason)
            return
        generated.prompt_tokens += len(output.prompt_token_ids)
        generated.cached_tokens += output.metrics.num_cached_tokens
        generated.finish_reasons += [each.finish_reason or reason for each in output.outputs]
        if self._with_text:
            answers = [each.text for each in output.outputs]
            generated.texts.append({"prompt": output.prompt, "answers": answers})

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Middleware`."""
        start, generated = time.monotonic(), _Generated()
        _generated.set(generated)

        def answered(status: int) -> None:
            _write(scope, status, time.monotonic() - start, generated)

        await run_watched(app, scope, receive, send, answered)


def _write(scope: Scope, status: int, seconds: float, generated: _Generated) -> None:
    level = logging.INFO if is_work(path_of(scope)) else logging.DEBUG
    if not logger.isEnabledFor(level):
        return
    # The path as received, without the query; characters that could break the line stay percent-encoded.
    path = quote(scope.get("raw_path") or scope["path"], safe="/%:@!$&'()*+,;=~")
    client = scope.get("client")
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": path,
        "status": status,
        "seconds": round(seconds, 6),
        "client": client[0] if client else None,
    }
    if (model := model_of(scope)) is not None:
        fields["model"] = model
    if generated.finish_reasons:
        fields["finish_reasons"] = generated.finish_reasons
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        if num_tokens := getattr(generated, name):
            fields[name] = num_tokens
    if generated.texts:
        fields["texts"] = generated.texts
    logger.log(level, "%s %s %d in %.3f s", scope["method"], path, status, seconds, extra={"fields": fields})
