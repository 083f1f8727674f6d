"""Every reader, slow or in any event loop, gets everything and delays no other reader."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM, AsyncLLM, SamplingParams
from inflight.contracts.api.outputs import RequestOutput
from inflight.text.tokenizer import Tokenizer
from tests.async_llm.helpers import GREEDY, LONG, PROMPTS, last
from tests.coroutines import run


def test_a_slow_reader_gets_more_at_once_and_delays_no_other_reader(llm: AsyncLLM) -> None:
    async def check() -> None:
        slow = llm.generate(PROMPTS[0], LONG)
        first = await anext(slow)
        fast = await last(llm, PROMPTS[0], LONG)
        while (await llm.stats()).num_running:
            pass
        rest = [output async for output in slow]
        assert len(rest) == (not first.finished)  # everything was there at once, if this test stalled
        assert [first, *rest][-1].outputs == fast.outputs

    run(check())


def test_one_llm_serves_several_event_loops_at_once_and_one_after_another(llm: AsyncLLM) -> None:
    results: list[RequestOutput] = []

    def serve() -> None:
        results.append(asyncio.run(last(llm, PROMPTS[0], GREEDY)))

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    serve()
    assert len(results) == 4
    assert all(result.outputs == results[0].outputs for result in results)


def test_a_text_is_tokenized_while_other_readers_are_served(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, encode = threading.Event(), Tokenizer.encode

    def slow(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        assert may_go_on.wait(60)
        return encode(tokenizer, text, **options)

    async def check() -> None:
        await llm.start()
        long = asyncio.create_task(last(llm, PROMPTS[0], GREEDY))
        assert (await last(llm, [5, 6, 7], GREEDY)).finished
        assert not long.done()
        may_go_on.set()
        assert (await long).finished

    monkeypatch.setattr(Tokenizer, "encode", slow)
    run(check())


SCRIPT = """
import asyncio
from inflight import AsyncLLM, SamplingParams

print("once")
llm = AsyncLLM()

async def answer():
    async for output in llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=5)):
        pass
    return output.outputs[0].text

print([asyncio.run(answer()) for _ in range(2)])
"""


@pytest.mark.thorough
def test_the_async_llm_works_in_a_plain_script(tmp_path: Path, offline: LLM) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    (expected,) = offline.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert done.stdout == f"once\n{[expected.outputs[0].text] * 2}\n"
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
