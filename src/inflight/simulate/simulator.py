"""`simulate`: requests on one simulated engine, on a virtual clock.

With the policy "fcfs", the scheduler gets no more of a synthetic load than it could admit in a step: its decisions are
the same, and a million requests take no memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.model_info import ModelInfo
from inflight.contracts.step.record import StepRecord
from inflight.observe.run_report import RunReport
from inflight.simulate.requests import SimulatedRequest, SyntheticLoad
from inflight.simulate.simulated_engine import AcceptanceRate, SimulatedEngine
from inflight.simulate.step_cost import Cost


def simulate(
    requests: Iterable[SimulatedRequest],
    config: EngineConfig,
    cost: Cost,
    *,
    model: ModelInfo | None = None,
    observer: Callable[[StepRecord], None] | None = None,
    acceptance_rate: AcceptanceRate | None = None,
) -> RunReport:
    """Run requests to their ends on a virtual clock that begins at 0.

    Args:
        requests: in order of arrival; taken one by one as the clock advances.
        config, cost, model, observer, acceptance_rate: see `SimulatedEngine`.

    Raises:
        ValueError: a request could never fit the cache, or arrives earlier than the request before it.
    """
    return Simulation(requests, config, cost, model, observer, acceptance_rate).run()


class Simulation:
    """The state of one run; see `simulate`."""

    def __init__(
        self,
        requests: Iterable[SimulatedRequest],
        config: EngineConfig,
        cost: Cost,
        model: ModelInfo | None,
        observer: Callable[[StepRecord], None] | None,
        acceptance_rate: AcceptanceRate | None = None,
    ) -> None:
        self.engine = SimulatedEngine(config, cost, model, observer, acceptance_rate)
        # Records contain the number waiting, and sessions are known by the times at which their requests arrive.
        submits_all = observer is not None or not isinstance(requests, SyntheticLoad)
        is_fcfs = config.scheduling.policy == "fcfs"
        self._most_waiting = config.scheduling.max_num_seqs if is_fcfs and not submits_all else inf
        self._incoming = in_order(requests)
        self._next = next(self._incoming, None)
        self._began = 0.0 if self._next is None else self._next.arrival

    def run(self) -> RunReport:
        """Run steps until all requests have finished."""
        engine = self.engine
        while True:
            self._submit_arrived()
            if engine.step(inf if self._next is None else self._next.arrival):
                continue
            if self._next is not None and not engine.has_unfinished_requests:
                engine.clock = self._next.arrival
            elif not engine.has_unfinished_requests:
                break
        return report_of([engine], engine.clock - self._began)

    def _submit_arrived(self) -> None:
        while (request := self._next) is not None and request.arrival <= self.engine.clock:
            if self.engine.scheduler.num_waiting >= self._most_waiting:
                return
            self.engine.submit(request)
            self._next = next(self._incoming, None)


def in_order(requests: Iterable[SimulatedRequest]) -> Iterator[SimulatedRequest]:
    """The requests. Raises `ValueError` at one that arrives earlier than the one before it."""
    before = None
    for request in requests:
        if before is not None and request.arrival < before.arrival:
            raise ValueError(f"requests {before.request_id!r} and {request.request_id!r} are out of order")
        yield request
        before = request


def report_of(engines: Sequence[SimulatedEngine], seconds: float) -> RunReport:
    """The report of all engines of a run of this many seconds."""
    log = engines[0].log
    for engine in engines[1:]:
        log.add(engine.log)
    schedulers = [engine.scheduler for engine in engines]
    return log.report(
        seconds,
        num_preemptions=sum(each.count.preemptions for each in schedulers),
        num_prompt_tokens=sum(each.count.prompt_tokens for each in schedulers),
        num_cached_tokens=sum(each.reuse.num_cached_tokens for each in schedulers),
    )
