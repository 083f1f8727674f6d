"""Event loops that are closed while their requests run."""

import asyncio

import pytest

from inflight import SamplingParams
from tests.async_llm.helpers import GREEDY, last
from tests.coroutines import run
from tests.stepper import Stepper


@pytest.mark.parametrize("n", [1, 2])
def test_a_closed_event_loop_does_not_affect_other_loops(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """A step may deliver several events for the request of the closed loop, which is never read again."""
    steps = Stepper(monkeypatch)
    steps.allow(1)
    loop = asyncio.new_event_loop()
    stream = steps.llm.stream([5, 6, 7], SamplingParams(n=n, max_tokens=40, ignore_eos=True))
    loop.run_until_complete(anext(stream))
    loop.close()
    steps.allow()

    async def check() -> None:
        output = await last(steps.llm, [1, 2, 3], GREEDY)
        assert output.outputs[0].finish_reason == "length"
        while (stats := await steps.llm.stats()).num_running:
            pass
        assert stats.num_blocks_used == stats.num_crashes == 0
        assert not (await steps.llm._session())._mailboxes
        await steps.llm.stop()

    run(check())
