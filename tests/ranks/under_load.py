"""Requests whose engine loses a rank."""

import asyncio
from collections.abc import Callable, Sequence

from inflight import AsyncLLM, EngineDeadError, SamplingParams

ENDLESS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, n=64)
"""In one slot: sixteen of these take minutes, and no stall lasts as long."""
OPTIONS = {"tensor_parallel_size": 2, "num_blocks": 60, "max_num_seqs": 1}


async def tokens(llm: AsyncLLM, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What follows a prompt."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    token_ids: list[int] = []
    async for output in llm.generate({"prompt_token_ids": list(prompt)}, params):
        token_ids = list(output.outputs[0].token_ids)
    return token_ids


async def messages_after(kill: Callable[[], None], llm: AsyncLLM, prompt: Sequence[int]) -> set[str]:
    """What all requests hear that run, or wait, when this kills a rank."""

    async def ask() -> None:
        async for _ in llm.generate({"prompt_token_ids": list(prompt)}, ENDLESS):
            pass

    asked = [asyncio.ensure_future(ask()) for _ in range(16)]
    while (await llm.stats()).num_requests < len(asked):
        await asyncio.sleep(0.01)
    kill()
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(each, EngineDeadError) for each in ends), ends
    return set(map(str, ends))
