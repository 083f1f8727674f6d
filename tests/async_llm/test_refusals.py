"""Impossible requests are refused with one sentence and leave nothing behind."""

import re
from typing import Any

import pytest

from inflight import AsyncLLM, InvalidRequestError, ModelError, SamplingParams
from tests import zoo
from tests.async_llm.helpers import ENDLESS, GREEDY, PROMPTS, idle, last
from tests.coroutines import run
from tests.text.tokenizers_for_tests import byte_level


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        ("", {}, "the prompt is empty"),
        ([1, 2.5], {}, "the prompt contains 2.5"),
        ([10**9], {}, "the prompt contains token id 1000000000"),
        ({"text": "a"}, {}, "a prompt given as a dict"),
        ([1], {"sampling_params": {"n": 2}}, "it must be SamplingParams"),
        ([1], {"priority": "high"}, "priority is 'high'"),
        ([1], {"cache_salt": 3}, "cache_salt is 3"),
    ],
)
def test_a_bad_request_is_refused_with_one_sentence(
    process_llm: AsyncLLM, prompt: Any, options: dict[str, Any], sentence: str
) -> None:
    async def check() -> None:
        with pytest.raises(InvalidRequestError, match=re.escape(sentence)):
            await last(process_llm, prompt, **({"sampling_params": GREEDY} | options))
        await idle(process_llm)

    run(check())


def test_refusals_by_the_engine_are_raised_in_the_caller() -> None:
    async def check() -> None:
        async with AsyncLLM(zoo.build("gpt2"), in_process=True) as llm:
            with pytest.raises(InvalidRequestError, match="no tokenizer to find text with"):
                await last(llm, [1, 2, 3], SamplingParams(stop="x"))
            await idle(llm)

    run(check())


def test_a_request_id_that_is_in_use_is_refused(llm: AsyncLLM) -> None:
    async def check() -> None:
        async for _ in llm.generate(PROMPTS[0], ENDLESS, "mine"):
            with pytest.raises(InvalidRequestError, match="'mine' is in use"):
                await last(llm, PROMPTS[1], GREEDY, "mine")
            break
        await idle(llm)
        await last(llm, PROMPTS[0], GREEDY, "mine")

    run(check())


def test_arguments_that_cannot_be_sent_to_a_process_are_refused() -> None:
    with pytest.raises(ModelError, match=r"the model is a loaded GPT2LMHeadModel, .* or in_process=True"):
        AsyncLLM(zoo.build("gpt2"))
    with pytest.raises(ModelError, match=r"the tokenizer is a loaded .*, .* or in_process=True"):
        AsyncLLM(None, byte_level().inner)
    with pytest.raises(ModelError, match="the model is a int"):
        AsyncLLM(3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="there is no model folder"):
        AsyncLLM("./nowhere")
    with pytest.raises(ValueError, match="AsyncLLM has no option 'max_seqs'; did you mean 'max_num_seqs'"):
        AsyncLLM(max_seqs=3)


@pytest.mark.parametrize("in_process", [False, True])
def test_a_model_that_cannot_be_loaded_is_refused_each_time(in_process: bool) -> None:
    async def check() -> None:
        llm = AsyncLLM(in_process=in_process, max_model_len=10**6)
        for _ in range(2 if in_process else 1):  # both do the same again, and a process takes seconds for it
            with pytest.raises(ModelError, match="max_model_len is 1000000; this model accepts at most"):
                await last(llm, PROMPTS[0])

    run(check())
