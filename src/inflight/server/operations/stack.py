"""All middlewares of this package around an application, in the one order in which they make sense.

From the outside: the id comes first, because all that follows logs; then who only watches (traces, log, metrics), so
that refusals are seen, too; then the door of the drain; then the key, so that a stranger gets no further; then limits.
CORS lies outside the key: a browser asks beforehand without one, and may only read a refusal that says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from inflight.server.operations.access_log import AccessLog
from inflight.server.operations.api_keys import ApiKeys
from inflight.server.operations.lifecycle import Drain
from inflight.server.operations.limits import BodyLimit, ConcurrencyLimit
from inflight.server.operations.metrics import Metrics
from inflight.server.operations.request_ids import RequestIds
from inflight.server.operations.tracing import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """What surrounds a server. Of the optional ones, None (or nothing) leaves it out.

    Attributes:
        max_body_bytes: of a request's body.
        max_requests: served at once; None: any number.
        allowed_origins: web pages' origins that browsers may call from; "*" is all.
    """

    drain: Drain
    access_log: AccessLog
    metrics: Metrics
    max_body_bytes: int
    max_requests: int | None = None
    api_keys: ApiKeys | None = None
    tracing: Tracing | None = None
    allowed_origins: Sequence[str] = ()

    def surround(self, app: ASGIApp) -> ASGIApp:
        """The application as it is served. It should answer `/health`, `/version` and, with `metrics.endpoint`,
        `/metrics`."""
        app = BodyLimit(app, self.max_body_bytes)
        if self.max_requests is not None:
            app = ConcurrencyLimit(app, self.max_requests)
        if self.api_keys is not None:
            app = self.api_keys.middleware(app)
        app = self.drain.middleware(app)
        if self.allowed_origins:
            app = CORSMiddleware(
                app,
                allow_origins=self.allowed_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "retry-after"],
            )
        app = self.access_log.middleware(self.metrics.middleware(app))
        if self.tracing is not None:
            app = self.tracing.middleware(app)
        return RequestIds(app)

    @property
    def observers(self) -> list[AccessLog | Metrics | Tracing]:
        """Who must be told of requests' `started`, `produced` and `finished`."""
        return [self.access_log, self.metrics, *([self.tracing] if self.tracing else [])]
