"""`AsyncLLM` pools for many callers, in a thread and in a process of its own."""

import asyncio

import pytest

from inflight import LLM, AsyncLLM, InvalidRequestError
from tests.pooling.checkpoints import classifier, make_model, save, words


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(make_model("bert"), tmp_path_factory.mktemp("bert"), "bert", pooling={"pooling_mode": "mean"})


@pytest.mark.parametrize("options", [{}, {"in_process": True}, {"replicas": 2}])
def test_callers_get_what_llm_gives(bert: str, options: dict[str, object]) -> None:
    texts = words(*range(1, 31))
    expected = [output.embedding for output in LLM(bert).embed(texts)]

    async def ask() -> list[list[object]]:
        async with AsyncLLM(bert, **options) as llm:
            calls = (llm.embed(texts[number::3]) for number in range(3))
            outputs = [[output.embedding for output in each] for each in await asyncio.gather(*calls)]
            scores = await llm.score(texts[0], texts[:2])
            assert abs(scores[0].score - 1) < 1e-6
            assert await llm.embed([]) == []
            assert llm.model_info.pooling is not None
            assert (await llm.stats()).num_requests == 33  # texts
            return outputs

    assert asyncio.run(ask()) == [expected[number::3] for number in range(3)]


def test_wrong_requests_are_refused(bert: str) -> None:
    async def ask() -> None:
        async with AsyncLLM(bert, in_process=True) as llm:
            with pytest.raises(InvalidRequestError, match="the text is empty"):
                await llm.embed("")
            with pytest.raises(InvalidRequestError, match="it does not generate text"):
                async for _ in llm.generate("w9"):
                    pass

    asyncio.run(ask())


def test_a_cancelled_call_is_aborted(bert: str) -> None:
    async def ask() -> None:
        async with AsyncLLM(bert, in_process=True, max_num_batched_tokens=16) as llm:
            call = asyncio.create_task(llm.embed(words(*[12] * 500)))
            while (await llm.stats()).num_requests == 0:
                pass
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            stats = await llm.stats()
            assert stats.num_waiting == 0
            assert stats.num_steps < 500

    asyncio.run(ask())


def test_a_classifier_in_a_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    name = save(classifier("bert", 3), tmp_path_factory.mktemp("classifier"), "bert")

    async def ask() -> list[list[float]]:
        async with AsyncLLM(name) as llm:
            return [list(output.probs) for output in await llm.classify(words(4, 9))]

    assert asyncio.run(ask()) == [list(output.probs) for output in LLM(name).classify(words(4, 9))]
