"""Log-probabilities, penalties and bad words through the whole engine match the plain model in any batch."""

import asyncio
import contextlib
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from inflight import LLM, AsyncLLM, SamplingParams
from inflight.contracts.api.errors import InvalidRequestError
from inflight.contracts.api.outputs import Logprob, TokenLogprobs
from inflight.contracts.step.plan import StepPlan, StepTokens
from inflight.engine.engine import Engine
from tests import zoo
from tests.text.tokenizers_for_tests import byte_level

PROMPTS = [[7, 9, 3] * 9, [1, 2, 3], [5], [7, 9, 3] * 9 + [4] * 20, [11, 3] * 40]
SCORED = SamplingParams(temperature=0, max_tokens=20, logprobs=3, prompt_logprobs=2)

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": {"max_num_batched_tokens": 13, "max_num_seqs": 4},
    "preemption": {"num_blocks": 22, "block_size": 5, "max_num_seqs": 5, "max_num_batched_tokens": 40},
    "no prefix cache": {"enable_prefix_caching": False},
}


def make_llm(**options: Any) -> LLM:
    return LLM(zoo.build("gpt2"), byte_level().inner, **options)


@cache
def plain_logprobs(token_ids: tuple[int, ...]) -> Tensor:
    """`[T, V]`: the log-probabilities of the token after each one."""
    with torch.inference_mode():
        return torch.log_softmax(zoo.build("gpt2")(torch.tensor([token_ids])).logits[0].double(), dim=-1)


def check(told: Sequence[TokenLogprobs | None], token_ids: Sequence[int], num_before: int, num_top: int) -> None:
    """Check the log-probabilities reported for the tokens after the first `num_before`."""
    logprobs = plain_logprobs(tuple(token_ids))
    for position, (of_token, token_id) in enumerate(zip(told, token_ids[num_before:], strict=True), start=num_before):
        assert of_token is not None
        expected = logprobs[position - 1]
        assert next(iter(of_token)) == token_id
        assert num_top <= len(of_token) <= num_top + 1
        for other, logprob in of_token.items():
            assert logprob.logprob == pytest.approx(float(expected[other]), abs=1e-3)
        assert of_token[token_id].rank == int((expected > expected[token_id]).sum()) + 1
        if num_top:
            assert max(each.logprob for each in of_token.values()) == pytest.approx(float(expected.max()), abs=1e-3)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_log_probabilities_match_the_plain_model(name: str) -> None:
    """Runs twice, so that the second run could find everything in the cache."""
    llm = make_llm(**CONFIGURATIONS[name])
    for _ in range(2):
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, SCORED, use_tqdm=False), strict=True):
            (completion,) = output.outputs
            assert output.prompt_logprobs is not None
            assert completion.logprobs is not None
            assert output.prompt_logprobs[0] is None
            check(output.prompt_logprobs[1:], prompt, 1, 2)
            check(completion.logprobs, [*prompt, *completion.token_ids], len(prompt), 3)
            own = [next(iter(each.values())).logprob for each in completion.logprobs]
            assert completion.cumulative_logprob == pytest.approx(sum(own))
            assert output.metrics.num_cached_tokens == 0
    if name == "preemption":
        assert llm.engine.scheduler.count.preemptions > 0
    llm.engine.scheduler.block_pool.check([])


def test_a_scored_prompt_fills_the_cache_for_others_and_has_the_same_scores_in_a_batch() -> None:
    llm = make_llm()
    (alone,) = llm.generate([PROMPTS[4]], SCORED, use_tqdm=False)
    unscored = SamplingParams(temperature=0, max_tokens=20)
    outputs = llm.generate([PROMPTS[4]] * 3, [unscored, SCORED, unscored], use_tqdm=False)
    assert [output.metrics.num_cached_tokens for output in outputs] == [64, 0, 64]
    assert [output.prompt_logprobs for output in outputs] == [None, alone.prompt_logprobs, None]
    assert outputs[0].outputs[0].logprobs is outputs[0].outputs[0].cumulative_logprob is None
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


def test_every_sequence_of_a_request_has_scores_and_the_prompt_is_scored_once() -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=5, logprobs=0, prompt_logprobs=0)
    (output,) = make_llm().generate([PROMPTS[3]], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    check(output.prompt_logprobs[1:], PROMPTS[3], 1, 0)
    for completion in output.outputs:
        assert completion.logprobs is not None
        check(completion.logprobs, [*PROMPTS[3], *completion.token_ids], len(PROMPTS[3]), 0)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) > 1


def test_a_long_prompt_holds_few_rows_of_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(zoo.build("llama"), max_num_batched_tokens=2048)
    num_rows: list[int] = []
    run = llm.engine.runner.run

    def watched(plan: StepPlan, masks: Any = None) -> StepTokens:
        num_rows.append(sum(span.num_logit_rows for span in plan.spans))
        return run(plan, masks)

    monkeypatch.setattr(llm.engine.runner, "run", watched)
    prompts = [[number, *([1, 2, 3] * 66)] for number in range(3)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert max(num_rows) <= 256 + len(prompts)
    assert sum(num_rows) == sum(map(len, prompts))
    assert all(len(output.prompt_logprobs or []) == len(output.prompt_token_ids) for output in outputs)


def test_streams_carry_scores_with_their_tokens_and_a_slow_reader_misses_none() -> None:
    async def run() -> None:
        async with AsyncLLM(zoo.build("gpt2"), byte_level().inner, in_process=True) as llm:
            pieces, prompt_logprobs, token_ids = [], [], []
            async for delta in llm.stream(PROMPTS[0], SCORED):
                assert delta.logprobs is not None
                assert len(delta.logprobs) == len(delta.token_ids)
                pieces += delta.logprobs
                token_ids += delta.token_ids
                if delta.prompt_logprobs is not None:
                    prompt_logprobs.append(delta.prompt_logprobs)
                await asyncio.sleep(0)  # some steps arrive together
            check(pieces, [*PROMPTS[0], *token_ids], len(PROMPTS[0]), 3)
            assert len(prompt_logprobs) == 1
            check(prompt_logprobs[0][1:], PROMPTS[0], 1, 2)

    asyncio.run(run())


def test_a_stop_string_removes_the_scores_of_its_tokens() -> None:
    llm = make_llm()
    (free,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12, logprobs=0), use_tqdm=False)
    stop = free.outputs[0].text[4:6]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, stop=stop)
    (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.stop_reason == stop
    assert completion.logprobs == (free.outputs[0].logprobs or [])[: len(completion.token_ids)]


def test_a_token_is_reported_with_its_text() -> None:
    (output,) = LLM().generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=3, logprobs=1))
    (first, *_) = output.outputs[0].logprobs or []
    assert isinstance(first, dict)
    logprob = first[output.outputs[0].token_ids[0]]
    assert isinstance(logprob, Logprob)
    assert output.outputs[0].text.startswith(logprob.decoded_token or "?")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_repetition_penalty_matches_that_of_generate(name: str) -> None:
    llm, model = make_llm(**CONFIGURATIONS[name]), zoo.build("gpt2")
    params = SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.7)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, repetition_penalty=1.7
        )
        assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.thorough
def test_frequency_penalties_do_not_change_after_a_preemption() -> None:
    params = SamplingParams(temperature=0, max_tokens=30, frequency_penalty=1.5, presence_penalty=-0.5)
    results = []
    for name in ("roomy", "preemption"):
        llm = make_llm(**CONFIGURATIONS[name])
        results.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)])
    assert llm.engine.scheduler.count.preemptions > 0
    assert results[0] == results[1]
    plain = make_llm().generate(PROMPTS, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    assert results[0] != [output.outputs[0].token_ids for output in plain]


def test_bad_words_never_appear_and_need_a_tokenizer() -> None:
    llm, prompt = LLM(), "Once upon a time"
    params = SamplingParams(temperature=0, max_tokens=40)
    (free,) = llm.generate([prompt], params, use_tqdm=False)
    words = [word for word in free.outputs[0].text.split() if word.isalpha()][:4]
    params = SamplingParams(temperature=0, max_tokens=40, bad_words=words)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert not set(words) & set(output.outputs[0].text.split())
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        LLM(zoo.build("gpt2")).generate([[1]], params, use_tqdm=False)


def test_a_bias_for_a_token_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias contains token id 256"):
        make_llm().generate([[1]], SamplingParams(logit_bias={256: 1.0}), use_tqdm=False)


def test_non_finite_logits_of_a_scored_prompt_fail_only_that_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make_llm()
    engine: Engine = llm.engine
    forward = engine.runner.executor.forward

    def broken(batch: Any) -> Tensor:
        logits = forward(batch).clone()
        if (batch.logit_targets_host >= 0).any():
            logits[2] = math.nan
        return logits

    monkeypatch.setattr(engine.runner.executor, "forward", broken)
    outputs = llm.generate([PROMPTS[0], PROMPTS[1]], [SCORED, SamplingParams(max_tokens=3)], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    engine.scheduler.block_pool.check([])


def test_a_request_that_ends_while_its_prompt_is_partly_scored_has_no_prompt_scores() -> None:
    llm = make_llm(max_num_batched_tokens=16)
    engine, run, steps = llm.engine, llm.engine.runner.run, iter(range(100))

    def broken(plan: StepPlan, masks: Any) -> StepTokens:
        if next(steps) == 2:
            raise RuntimeError("the device is on fire")
        return run(plan, masks)

    engine.runner.run = broken  # type: ignore[method-assign]
    (output,) = llm.generate([PROMPTS[4]], SCORED, use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.prompt_logprobs) == ("error", None)


def test_a_repeated_step_scores_its_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes when everything was computed."""
    llm = make_llm(max_num_batched_tokens=16)
    engine, run, calls = llm.engine, llm.engine.runner.run, iter(range(1000))

    def interrupted(*args: Any) -> Any:
        given = run(*args)
        if next(calls) in (2, 4, 12):
            raise KeyboardInterrupt
        return given

    monkeypatch.setattr(engine.runner, "run", interrupted)
    engine.submit(engine.inputs.accept("0", PROMPTS[4], SCORED))
    outputs = []
    while engine.has_unfinished_requests:
        with contextlib.suppress(KeyboardInterrupt):
            outputs += engine.step()
    scores = [output.prompt_scores for output in outputs if output.prompt_scores is not None]
    assert [len(each) for each in scores] == [len(PROMPTS[4]) - 1]
