"""`keep_running`: restarts an engine that has died, without waiting for a request.

Knows nothing of requests: they wait for the engine, or learn of its death, by themselves.
"""

import asyncio
from contextlib import suppress

from inflight.async_llm import AsyncLLM
from inflight.contracts.errors import EngineDeadError, ModelError

SECONDS_BETWEEN_LOOKS = 0.5


async def keep_running(llm: AsyncLLM) -> None:
    """Start the engine, and restart it whenever it has died, until cancelled."""
    while True:
        with suppress(EngineDeadError, ModelError):  # requests and /health report it
            llm.is_ready()
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
