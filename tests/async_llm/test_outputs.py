"""Outputs equal those of the offline `LLM`, grow over time, and are counted."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from inflight import LLM, AsyncLLM, SamplingParams
from tests import zoo
from tests.async_llm.helpers import GREEDY, PROMPTS, last
from tests.coroutines import run
from tests.text.tokenizers_for_tests import byte_level


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(n=3, temperature=0.9, top_p=0.9, seed=7, max_tokens=20),
        SamplingParams(temperature=0, max_tokens=40, stop=["a", "the"]),
        SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(300, 301), truncate_prompt_tokens=2),
        None,
    ],
)
@pytest.mark.thorough("thread", "process-None")
def test_outputs_match_the_offline_llm(llm: AsyncLLM, offline: LLM, params: SamplingParams | None) -> None:
    if params is None:
        run(llm.start())
        assert llm.get_default_sampling_params() == offline.get_default_sampling_params()
        params = SamplingParams(seed=3, max_tokens=5)

    async def check() -> None:
        return await asyncio.gather(*(last(llm, prompt, params) for prompt in PROMPTS))  # type: ignore[return-value]

    outputs: Any = asyncio.run(check())
    for output, expected in zip(outputs, offline.generate(PROMPTS, params, use_tqdm=False), strict=True):
        assert output.outputs == expected.outputs
        assert (output.prompt, output.prompt_token_ids) == (expected.prompt, expected.prompt_token_ids)
        metrics = output.metrics
        assert metrics.arrival_time < metrics.first_scheduled_time < metrics.first_token_time
        assert metrics.first_token_time <= metrics.finished_time  # a late reader gets everything at once


def test_an_output_grows_and_earlier_outputs_do_not_change(llm: AsyncLLM) -> None:
    async def check() -> None:
        seen = [output async for output in llm.generate(PROMPTS[0], GREEDY, "mine")]
        assert {output.request_id for output in seen} == {"mine"}
        texts = [output.outputs[0].text for output in seen]
        tokens = [output.outputs[0].token_ids for output in seen]
        for shorter, longer in pairwise(seen):
            assert longer.outputs[0].text.startswith(shorter.outputs[0].text)
            assert longer.outputs[0].token_ids[: len(shorter.outputs[0].token_ids)] == shorter.outputs[0].token_ids
        assert len(tokens[-1]) == 12
        deltas = [delta async for delta in llm.stream(PROMPTS[0], GREEDY)]
        assert "".join(map(str, deltas)) == texts[-1]
        assert [token for delta in deltas for token in delta.token_ids] == tokens[-1]
        assert deltas[-1].finish_reason == "length"
        assert deltas[-1].output is not None
        assert deltas[-1].output.outputs == seen[-1].outputs
        assert all(delta.output is None for delta in deltas[:-1])

    run(check())


def test_a_chat_uses_the_chat_template(llm: AsyncLLM, offline: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me a story"}]

    async def check() -> None:
        outputs = [output async for output in llm.chat(messages, GREEDY)]
        (expected,) = offline.chat(messages, GREEDY, use_tqdm=False)
        assert outputs[-1].outputs == expected.outputs
        with pytest.raises(ValueError, match=r"AsyncLLM\.chat has no option 'template'"):
            llm.chat(messages, GREEDY, template="")

    run(check())


def test_a_chat_without_parameters_has_no_limit_of_tokens() -> None:
    """Whichever way it comes in."""
    llm = AsyncLLM(zoo.build("gpt2"), byte_level().inner, in_process=True, max_model_len=60)
    chat = {"messages": [{"role": "user", "content": "42%"}], "chat_template": "{{ messages[0].content }}"}

    async def check() -> None:
        for outputs in (llm.chat(**chat), llm.generate(chat)):
            answer = [output async for output in outputs][-1]
            (given,) = answer.outputs  # which ends where the model ends it, or where its context is full
            assert given.finish_reason == "stop" or len(answer.prompt_token_ids) + len(given.token_ids) == 60
        await llm.stop()

    run(check())


def test_the_model_is_known_once_it_is_loaded() -> None:
    llm = AsyncLLM(zoo.build("gpt2"), in_process=True)
    with pytest.raises(RuntimeError, match="not loaded yet"):
        _ = llm.model_info

    async def check() -> None:
        async with llm:
            assert llm.model_info.model_class == "GPT2LMHeadModel"
            assert llm.get_default_sampling_params() == SamplingParams()
            await llm.check_health()
            assert llm.tokenizer is None

    run(check())


def test_stats_count_requests_tokens_and_what_the_cache_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        options: dict[str, Any] = {"block_size": 4, "num_blocks": 50, "speculation": "off"}
        async with AsyncLLM(zoo.build("gpt2"), in_process=True, **options) as llm:
            for _ in range(2):
                await last(llm, [3] * 17, SamplingParams(temperature=0, max_tokens=5))
            stats = await llm.stats()
            assert (stats.num_requests, stats.num_prompt_tokens, stats.num_generated_tokens) == (2, 34, 10)
            assert stats.num_cached_tokens == 16
            assert stats.cache_hit_rate == 16 / 34
            assert stats.num_steps == 10
            assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (0, 0, 0)
            assert stats.num_blocks_used == 0
            assert stats.num_blocks_cached > 0
            assert stats.num_blocks_cached + stats.num_blocks_free == 50

    run(check())
