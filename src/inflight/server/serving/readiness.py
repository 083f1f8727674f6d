"""`keep_running`: an engine that has died is started anew, with nobody asking for it.

Knows nothing of requests: those wait for the engine, or hear of its death, by themselves.
"""

import asyncio
from contextlib import suppress

from inflight.async_llm import AsyncLLM
from inflight.contracts.errors import EngineDeadError, ModelError

SECONDS_BETWEEN_LOOKS = 0.5


async def keep_running(llm: AsyncLLM) -> None:
    """Start the engine, and again whenever it has died. Until cancelled, or in vain."""
    while True:
        with suppress(EngineDeadError, ModelError):  # it is told to those who ask
            llm.is_ready()
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
