"""Draft tokens, accepted or rejected, do not change a request's output: the same tokens, text and log-probabilities,
bit for bit."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from inflight import LLM, SamplingParams, StructuredOutput
from inflight.contracts.step.plan import SpanTokens, StepPlan, StepTokens
from inflight.contracts.step.record import StepRecord
from tests import zoo
from tests.grammar.helpers import WIDE
from tests.speculation.oracle import Oracle, make_it_ask, make_rows_free
from tests.speculation.random_requests import generate, random_requests, said, sequences
from tests.text.tokenizers_for_tests import byte_level

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "preemption": {"num_blocks": 48, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 24},
    "int4 cache": {"kv_cache_dtype": "int4", "dtype": "bfloat16"},
    "priorities": {"policy": "priority", "aging_steps": 2, "max_num_seqs": 3},
}
NUM_REQUESTS = 60


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.thorough("float32", "int8]")
def test_random_requests_do_not_notice_draft_tokens(name: str) -> None:
    options = CONFIGURATIONS[name]
    prompts, params = random_requests(NUM_REQUESTS, name)
    expected = generate(LLM(**options), prompts, params)
    llm = LLM(**options, speculation="auto")
    oracle = Oracle(sequences(expected), llm.engine.model_info.vocab_size)
    make_it_ask(llm.engine, oracle)
    for output, wanted in zip(generate(llm, prompts, params), expected, strict=True):
        assert said(output) == said(wanted)
    assert oracle.num_draft_tokens > 500
    assert llm.engine.stats().num_accepted_tokens > 100
    if name == "preemption":
        assert llm.engine.stats().num_preemptions > 0
    llm.engine.scheduler.block_pool.check([])


@pytest.mark.parametrize("speculation", ["auto", "lookup", "grammar"])
@pytest.mark.thorough
def test_its_own_drafters_change_nothing(speculation: str) -> None:
    prompts, params = random_requests(NUM_REQUESTS, speculation)
    expected = generate(LLM(), prompts, params)
    llm = LLM(speculation=speculation)
    for _ in range(2):  # the second time what the first gave is looked up
        for output, wanted in zip(generate(llm, prompts, params), expected, strict=True):
            assert said(output) == said(wanted)


@pytest.mark.thorough
def test_a_prediction_saves_steps_and_changes_nothing() -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, logprobs=2)
    (plain,) = LLM(speculation="off").generate("Once upon a time", params, use_tqdm=False)
    predicted = replace(params, prediction=plain.outputs[0].text)
    llm = LLM()
    make_rows_free(llm.engine)
    (output,) = llm.generate("Once upon a time", predicted, use_tqdm=False)
    assert said(output) == said(plain)
    assert output.metrics.num_accepted_tokens > 20


def test_a_request_that_asks_for_no_draft_tokens_gets_none() -> None:
    params = SamplingParams(temperature=0, max_tokens=60, prediction="Tom had a red ball", speculation=False)
    llm = LLM()
    make_rows_free(llm.engine)
    (output,) = llm.generate("Tom had a red ball. Tom had a red ball. Tom", params, use_tqdm=False)
    assert output.metrics.num_draft_tokens == 0


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mistral", "gpt_oss", "qwen3_moe", "phi3_longrope", "deepseek_v3"])
@pytest.mark.thorough("gpt2", "gemma2")
def test_every_kind_of_attention_takes_rejected_draft_tokens_back(name: str) -> None:
    """Windows, sinks, soft caps, experts, latent attention and LongRoPE's border, which sequences cross here."""
    model, tokenizer = zoo.build(name), byte_level().inner
    prompts = [{"prompt_token_ids": [(7 * each + place) % 250 for place in range(30 + each)]} for each in range(12)]
    params = [
        SamplingParams(temperature=each % 2, seed=each, max_tokens=50, logprobs=2, ignore_eos=True)
        for each in range(len(prompts))
    ]
    options: dict[str, Any] = {"num_blocks": 60, "max_num_seqs": 5}
    expected = LLM(copy.deepcopy(model), tokenizer, **options).generate(prompts, params, use_tqdm=False)
    llm = LLM(model, tokenizer, **options, speculation="lookup")
    oracle = Oracle(sequences(expected), zoo.VOCAB_SIZE)
    make_it_ask(llm.engine, oracle)
    for output, wanted in zip(llm.generate(prompts, params, use_tqdm=False), expected, strict=True):
        assert said(output) == said(wanted)
    assert oracle.num_draft_tokens > 500


@pytest.mark.parametrize("stop", [None, "time"])
@pytest.mark.thorough
def test_a_sequence_that_fails_after_accepted_draft_tokens_ends_alone(
    stop: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with what came before, and with its error; unless a stop string in that has ended it."""
    prompts, params = ["Once upon a", "The cat"], SamplingParams(temperature=0, max_tokens=30, logprobs=1, stop=stop)
    expected = generate(LLM(speculation="off"), prompts, [params] * 2)
    llm = LLM()
    make_it_ask(llm.engine, Oracle(sequences(generate(LLM(), prompts, [replace(params, stop=None)] * 2)), 1000, 1.0))
    run, failed = llm.engine.runner.run, list[int]()

    def failing(plan: StepPlan, masks: Any) -> StepTokens:
        given = run(plan, masks)
        if not failed and len(given[0].token_ids) > 2:
            first = given[0]
            failed.append(len(first.token_ids) - 1)
            given[0] = SpanTokens(first.token_ids[:-1], False, first.scores[:-1], first.prompt_scores)
        return given

    monkeypatch.setattr(llm.engine.runner, "run", failing)
    first, second = generate(llm, prompts, [params] * 2)
    assert said(second) == said(expected[1])
    assert failed
    if stop is not None:
        assert said(first) == said(expected[0])
        return
    (completion,), (whole,) = first.outputs, expected[0].outputs
    assert (completion.finish_reason, first.error) == (
        "error",
        "the model's logits are not finite, or no token is allowed",
    )
    assert len(completion.token_ids) >= failed[0]
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    assert [each.keys() for each in completion.logprobs or []] == [
        each.keys() for each in (whole.logprobs or [])[: len(completion.token_ids)]
    ]
    llm.engine.scheduler.block_pool.check([])


@pytest.mark.thorough
def test_a_grammar_over_its_limits_after_accepted_draft_tokens_ends_alone() -> None:
    llm = LLM()
    make_rows_free(llm.engine)
    grammar = WIDE.replace("start: ", 'start: /[xy]/ "abc" ')  # after its first token a draft token reaches the limit
    wide = SamplingParams(temperature=0, structured_output=StructuredOutput(grammar=grammar))
    free = SamplingParams(temperature=0)
    failed, other = generate(llm, ["The cat"] * 2, [wide, free])
    assert "cannot be followed" in (failed.error or "")
    assert failed.outputs[0].finish_reason == "error"
    assert failed.metrics.num_accepted_tokens > 0
    expected = generate(LLM(speculation="off"), ["The cat"] * 2, [wide, free])
    assert [said(failed), said(other)] == [said(each) for each in expected]


def test_a_model_that_cannot_take_back_says_so() -> None:
    info = LLM(zoo.build("gpt2"), byte_level().inner, executor="rows", speculation="auto").engine.model_info
    assert info.speculation.startswith("off: speculation is not supported with a model that does not run packed")


@pytest.mark.thorough
def test_draft_tokens_are_counted_and_recorded() -> None:
    prompts, params = random_requests(NUM_REQUESTS, "counted")
    expected = generate(LLM(), prompts, params)
    llm = LLM(speculation="auto")
    make_it_ask(llm.engine, Oracle(sequences(expected), llm.engine.model_info.vocab_size))
    records: list[StepRecord] = []
    llm.engine.observer = records.append
    outputs = generate(llm, prompts, params)
    stats, spans = llm.engine.stats(), [span for record in records for span in record.spans]
    num_draft_tokens = sum(output.metrics.num_draft_tokens for output in outputs)
    num_accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    assert 0 < num_accepted < num_draft_tokens
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (num_draft_tokens, num_accepted)
    assert sum(span.num_draft_tokens for span in spans) == num_draft_tokens
    assert sum(span.num_accepted for span in spans) == num_accepted
    assert {span.kind for span in spans if span.num_draft_tokens} <= {"decode", "prefill"}
    without_stop_strings = [each for each, param in zip(outputs, params, strict=True) if not param.stop]
    for output in without_stop_strings:
        given = sum(span.num_new_tokens for span in spans if span.request_id == output.request_id)
        assert given == sum(len(each.token_ids) for each in output.outputs)
