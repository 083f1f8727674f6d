"""Whether the engine can be used now: known at once, whatever it is doing; and one that has died is started anew.

Knows nothing of requests: those wait for the engine, or hear of its death, by themselves.
"""

import asyncio
from contextlib import suppress

from inflight.async_llm import AsyncLLM
from inflight.errors import EngineDeadError, ModelError

SECONDS_BETWEEN_LOOKS = 0.5


def is_ready(llm: AsyncLLM) -> bool:
    """Whether the engine is loaded and runs; one that does not is started. Does not wait.

    Raises `EngineDeadError` if it has died too often, `ModelError` if its model can not be loaded."""
    started = llm._supervisor.start()
    if not started.done():
        return False
    started.result()
    return True


async def keep_running(llm: AsyncLLM) -> None:
    """Start the engine, and again whenever it has died, with nobody asking for it. Until cancelled, or in vain."""
    while True:
        with suppress(EngineDeadError, ModelError):  # it is told to those who ask
            is_ready(llm)
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
