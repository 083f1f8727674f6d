"""Support for tests that are coroutines."""

import asyncio
from collections.abc import Coroutine
from typing import Any


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine with a time limit."""

    async def limited() -> None:
        async with asyncio.timeout(240):
            await work

    asyncio.run(limited())
