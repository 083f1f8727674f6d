"""An engine under a test's control: each step waits for permission, and may fail."""

import threading
from typing import Any

import pytest

from inflight import AsyncLLM
from inflight.contracts.step.plan import StepPlan, StepTokens
from inflight.engine.engine import Engine
from tests import zoo
from tests.text.tokenizers_for_tests import byte_level


class Stepper:
    """Steps an in-process engine on a tiny model.

    Attributes:
        engines: all engines that were created; the last one is running.
        run: what a step does after it was allowed.
        error: what the step raises instead.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.engines: list[Engine] = []
        self.error: Exception | None = None
        self._permits = threading.Semaphore(0)
        self._is_held = threading.Event()
        self._is_free = False
        monkeypatch.setattr("inflight.engine.engine.Engine", self._make)
        self.llm = AsyncLLM(zoo.build("gpt2"), byte_level().inner, in_process=True, restart_delays=(0.0,), **options)

    def allow(self, num_steps: int | None = None) -> None:
        """Allow this number of steps, or all steps from now on."""
        self._is_free = num_steps is None
        self._permits.release(num_steps or 1)

    def wait_until_held(self) -> None:
        """Return once a step waits for permission. The engine receives later messages only after that step."""
        assert self._is_held.wait(60)

    def _make(self, *args: Any) -> Engine:
        engine = Engine(*args)
        self.run, engine.runner.run = engine.runner.run, self._wait  # type: ignore[method-assign]
        self.engines.append(engine)
        return engine

    def _wait(self, plan: StepPlan, masks: Any) -> StepTokens:
        if not self._is_free and plan.spans:
            self._is_held.set()
            self._permits.acquire(timeout=100)
            self._is_held.clear()
        if self.error is not None and plan.spans:
            raise self.error
        return self.run(plan, masks)
