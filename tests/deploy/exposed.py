"""`/metrics` of a server on which every event happened once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from inflight import SamplingParams
from inflight.server.models.load_scheduler import LoadScheduler
from inflight.server.models.metrics import Loads
from inflight.server.models.pool import InMemory, ModelPool
from inflight.server.operations.metrics import PROCESS, MergedCollector, Metrics
from tests.deploy.promql import Exposed
from tests.server.operations.serving import client_of
from tests.server.operations.test_metrics import output_of, scripted, stats_of
from tests.test_engine_process import INFO

ENDS = ("stop", "length", "abort", "timeout", "error", "refused")
STATUSES = (200, 400, 429, 503)


async def _answer(request: Request) -> Response:
    return Response(status_code=int(request.headers["wanted"]))


async def _metrics() -> Exposed:
    metrics = Metrics("tiny", scripted(stats_of(10, num_crashes=1)), lambda: 1)
    metrics.engines.describe_cache(INFO, 1)
    metrics.describe_adapters(64)
    for end in ENDS:
        metrics.started("a", 1, SamplingParams())
        metrics.produced("a", 1, 1.0)
        metrics.finished("a", output_of(2), end)
    app = Starlette(routes=[Route("/v1/completions", _answer, methods=["POST"])])
    async with client_of(metrics.middleware(app)) as client:
        for status in STATUSES:
            await client.post("/v1/completions", headers={"wanted": str(status)})
    await metrics.update()
    pool: ModelPool[InMemory] = ModelPool({"tiny": _load}, LoadScheduler({"tiny": 1}, 1))
    with pool.use("tiny") as use:
        await use.model()
    text = generate_latest(MergedCollector([PROCESS, metrics.registry, Loads(pool)])).decode()
    await pool.close()
    return Exposed(text)


@dataclass
class _Model:
    num_bytes: int = 1


@asynccontextmanager
async def _load(lose: Callable[[Exception], None]) -> AsyncIterator[_Model]:
    yield _Model()


def exposed() -> Exposed:
    """What `/metrics` says then."""
    return asyncio.run(_metrics())
