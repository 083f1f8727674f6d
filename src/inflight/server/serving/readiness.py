"""`keep_running`: restarts an engine that has died, without waiting for a request, and says when that is of no use.

Knows nothing of requests: they wait for the engine, or learn of its death, by themselves.
"""

import asyncio
from collections.abc import Callable

from inflight.async_llm import AsyncLLM
from inflight.contracts.errors import EngineDeadError, EngineGivenUpError, ModelError

SECONDS_BETWEEN_LOOKS = 0.5


async def keep_running(llm: AsyncLLM, on_loss: Callable[[Exception], None]) -> None:
    """Start the engine, and restart it whenever it has died, until cancelled, or until it cannot be started any more.

    Args:
        on_loss: called then, with the reason.
    """
    while True:
        try:
            await llm.start()
        except (EngineGivenUpError, ModelError) as error:
            on_loss(error)
            return
        except EngineDeadError:
            pass  # requests and /health report it, and the next start waits as long as it should
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
