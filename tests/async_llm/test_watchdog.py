"""An engine that hangs is killed, counts as crashed, and is started again; one that only takes long is left alone."""

import os
import signal
import threading

import pytest

from inflight import AsyncLLM, EngineDeadError
from inflight.engine.process import watchdog
from inflight.engine.process.connection import ProcessConnection
from inflight.engine.process.watchdog import NUM_LOOKS, TIMES_LONGEST, Watchdog
from tests.async_llm.helpers import ENDLESS, GREEDY, PROMPTS, last
from tests.coroutines import run


class ScriptedAnswer(threading.Event):
    """An answer that arrives after a number of polls; `waits` gives the number for each engine's answers."""

    def __init__(self, waits: list[int]) -> None:
        super().__init__()
        self.waits, self.num_left, self.timeouts = waits, 0, list[float]()

    def clear(self) -> None:
        self.num_left = self.waits.pop(0)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.timeouts.append(timeout)
        self.num_left -= 1
        return self.num_left < 0


def watched(waits: list[int], times: list[float]) -> tuple[list[str], float | None]:
    """What a watchdog with a timeout of ten seconds does to an engine, and how long that was silent when killed.

    Args:
        waits: how many looks each answer takes; the engine ends after the last.
        times: what the clock says at each question and each answer.
    """
    done: list[str] = []
    has_ended = threading.Event()

    class Timeless(Watchdog):
        _clock = staticmethod(lambda: times.pop(0))

        def _run(self) -> None:
            self._answer = ScriptedAnswer(waits)

            class Stopping(threading.Event):
                def wait(self, timeout: float | None = None) -> bool:
                    return not waits

            self._stopping = Stopping()
            super()._run()
            has_ended.set()

    dog = Timeless(lambda: done.append("ask"), lambda: done.append("kill"), 10.0)
    assert has_ended.wait(60)
    return done, dog.has_killed


def test_an_engine_that_does_not_answer_in_time_is_killed() -> None:
    assert watched([NUM_LOOKS - 1, NUM_LOOKS], [0, 0, 0]) == (["ask", "ask", "kill"], 10.0)


def test_steps_may_take_as_long_as_they_have_taken_many_times_over() -> None:
    longest = 3.0
    allowed = round(TIMES_LONGEST * longest)
    assert watched([2, allowed - 1, 0], [0, longest, 0, 0, 0, 0]) == (["ask"] * 3, None)
    assert watched([2, allowed], [0, longest, 0]) == (["ask", "ask", "kill"], allowed)


@pytest.mark.thorough
def test_an_engine_that_is_stopped_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "TIMES_LONGEST", 1)

    async def check() -> None:
        async with AsyncLLM(num_blocks=2000, restart_delays=(0.0,) * 9, step_timeout=3.0) as llm:
            stream = llm.generate(PROMPTS[0], ENDLESS)
            await anext(stream)
            session = llm._client._session
            assert session is not None
            assert isinstance(session.connection, ProcessConnection)
            os.kill(session.connection.pid, signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match=r"the engine did not answer for \S+ s, and was killed"):
                async for _ in stream:
                    pass
            assert llm.num_crashes >= 1
            assert (await last(llm, PROMPTS[0], GREEDY)).finished

    run(check())


def test_the_timeout_is_checked() -> None:
    with pytest.raises(ValueError, match=r"step_timeout is 0; it must be a number of seconds above 0"):
        AsyncLLM(step_timeout=0)
