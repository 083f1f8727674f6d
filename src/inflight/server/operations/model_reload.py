"""`ModelReload`: on a signal, loads the model anew beside the one that is served, without refusing a request."""

import asyncio
import logging
import time
from typing import Protocol

from inflight.contracts.errors import EngineDeadError, ModelError

logger = logging.getLogger("inflight.server")


class Reloadable(Protocol):
    """What is served."""

    async def reload_weights(self) -> None:
        """See `AsyncLLM.reload_weights`."""


class ModelReload:
    """At most one at a time; what is asked for meanwhile is done afterwards, once."""

    def __init__(self, llm: Reloadable) -> None:
        self._llm = llm
        self._running: asyncio.Task[None] | None = None
        self._is_asked_again = False

    def begin(self) -> None:
        """Begin, in the event loop."""
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._run())
        else:
            self._is_asked_again = True

    async def _run(self) -> None:
        while True:
            self._is_asked_again = False
            logger.info("the model is loaded anew, and served when it is ready")
            start_time = time.monotonic()
            try:
                await self._llm.reload_weights()
                logger.info("the model was loaded anew in %.1f s", time.monotonic() - start_time)
            except (ModelError, EngineDeadError) as error:
                logger.error("the model cannot be loaded anew, so what was served stays: %s", error)
            if not self._is_asked_again:
                return
