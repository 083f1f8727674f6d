"""Requests for an engine, and conditions to wait for."""

from typing import Any

from inflight import AsyncLLM, SamplingParams
from inflight.contracts.api.outputs import RequestOutput

PROMPTS: list[str | list[int]] = ["Once upon a time", "In a quiet village", "The fox", [5, 6, 7]]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, n=64, max_tokens=900, ignore_eos=True)
"""A request that takes far longer than any test may stall, so it is still running when a test ends it."""


async def last(llm: AsyncLLM, *args: Any, **options: Any) -> RequestOutput:
    """The complete output of a request."""
    outputs = [output async for output in llm.generate(*args, **options)]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return outputs[-1]


async def idle(llm: AsyncLLM) -> None:
    """Return once nothing runs or waits, and check that nothing was kept."""
    while True:
        stats = await llm.stats()
        if not stats.num_running and not stats.num_waiting:
            break
    assert stats.num_blocks_used == 0
    assert not llm._calls
    assert not (await llm._session())._mailboxes
