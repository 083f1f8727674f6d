"""`simulate_replicas`: requests on several simulated engines, routed by the server's router.

The router learns of first tokens and ends at the end of their steps, as in the server.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.step.block_hash import Root
from inflight.engine.replicas.router import ReplicaSize, RoutedRequest, Router
from inflight.observe.run_report import RunReport
from inflight.simulate.requests import SimulatedRequest
from inflight.simulate.simulated_engine import AcceptanceRate, SimulatedEngine
from inflight.simulate.simulator import in_order, report_of
from inflight.simulate.step_cost import Cost


def simulate_replicas(
    requests: Iterable[SimulatedRequest],
    config: EngineConfig,
    cost: Cost,
    num_replicas: int,
    routing: str,
    *,
    model: ModelInfo | None = None,
    acceptance_rate: AcceptanceRate | None = None,
) -> RunReport:
    """Run requests to their ends on a virtual clock that begins at 0, prefill beside decodes bounded as in a server.

    Args:
        requests: in order of arrival; taken one by one as the clock advances.
        config, cost, model, acceptance_rate: those of each engine; see `SimulatedEngine`.
        routing: see `Router`.

    Raises:
        ValueError: a request could never fit the cache, or arrives earlier than the request before it.
    """
    fleet = _Fleet(config, cost, num_replicas, routing, model, acceptance_rate)
    began = None
    for request in in_order(requests):
        began = request.arrival if began is None else began
        fleet.run_until(request.arrival)
        fleet.submit(request)
    fleet.run_until(float("inf"))
    return report_of(fleet.engines, max(engine.clock for engine in fleet.engines) - (began or 0.0))


@dataclass(order=True, slots=True)
class _RouterEvent:
    """An event for the router; ordered by time, then number."""

    time: float
    number: int
    request_id: str
    is_end: bool


class _Fleet:
    """Engines, each with its own clock, and their router."""

    def __init__(
        self,
        config: EngineConfig,
        cost: Cost,
        num_replicas: int,
        routing: str,
        model: ModelInfo | None,
        acceptance_rate: AcceptanceRate | None,
    ) -> None:
        self.engines = [
            SimulatedEngine(
                config,
                cost,
                model,
                acceptance_rate=acceptance_rate,
                limits_prefill=True,
                on_first_token=partial(self._post, number, False),
                on_end=partial(self._post, number, True),
            )
            for number in range(num_replicas)
        ]
        pool = self.engines[0].pool
        shares = config.prefix_cache.enabled and (model is None or model.can_share_prefixes)
        num_blocks = pool.num_blocks // len(pool.layout.groups) if shares else 0
        size = ReplicaSize(config.scheduling.max_num_seqs, num_blocks, config.kv_cache.block_size)
        self._router = Router(routing, num_replicas, size, config.seed)
        self._news: list[_RouterEvent] = []
        self._numbers = count()
        self._sent: dict[str, tuple[RoutedRequest, SimulatedRequest]] = {}

    def run_until(self, time: float) -> None:
        """Run all steps that begin before that time, and pass the router its events."""
        for engine in self.engines:
            while engine.has_unfinished_requests and engine.clock < time:
                engine.step(time)
        while self._news and self._news[0].time <= time:
            self._tell(heappop(self._news))

    def submit(self, request: SimulatedRequest) -> None:
        """Route a request that arrives now."""
        available = range(len(self.engines))
        num_sequences = len(request.num_output_tokens)
        sent = self._router.send(request.prompt_token_ids, Root(), available, request.arrival, num_sequences)
        self._sent[request.request_id] = sent, request
        engine = self.engines[sent.replica]
        if not engine.has_unfinished_requests:
            engine.clock = max(engine.clock, request.arrival)
        engine.submit(request)

    def _post(self, number: int, is_end: bool, request_id: str) -> None:
        heappush(self._news, _RouterEvent(self.engines[number].clock, next(self._numbers), request_id, is_end))

    def _tell(self, event: _RouterEvent) -> None:
        sent, request = self._sent[event.request_id]
        if event.is_end:
            del self._sent[event.request_id]
            self._router.end(sent, event.time, request.prompt_token_ids)
        else:
            self._router.begin(sent, event.time)
