"""The embedded model in a process, in a thread, and in the offline `LLM`."""

import asyncio
from collections.abc import Iterator

import pytest

from inflight import LLM, AsyncLLM


@pytest.fixture(scope="package")
def process_llm() -> Iterator[AsyncLLM]:
    """The embedded model in its own process."""
    llm = AsyncLLM(restart_delays=(0.0, 0.0), num_blocks=2000)
    yield llm
    asyncio.run(llm.stop())


@pytest.fixture(scope="package", params=["process", "thread"])
def llm(request: pytest.FixtureRequest, process_llm: AsyncLLM) -> Iterator[AsyncLLM]:
    """The embedded model, once in a process and once in a thread."""
    if request.param == "process":
        yield process_llm
        return
    llm = AsyncLLM(in_process=True, num_blocks=2000)
    yield llm
    asyncio.run(llm.stop())


@pytest.fixture(scope="package")
def offline() -> LLM:
    return LLM()
