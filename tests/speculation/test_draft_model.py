"""A draft model changes no output, saves steps by accepted draft tokens, and computes no token twice."""

import copy
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inflight import LLM, ModelError, SamplingParams
from inflight.contracts.step.plan import SpanTokens, StepPlan, StepTokens
from inflight.demo_model import DEMO_MODEL
from inflight.scheduling.draft_tokens import Candidate
from inflight.speculation import DraftLayout, DraftModelProposer
from tests import zoo
from tests.speculation.oracle import make_rows_free
from tests.speculation.random_requests import generate, random_requests, said
from tests.text.tokenizers_for_tests import byte_level

NUM_REQUESTS = 60


def drafted(draft_model: object = DEMO_MODEL, **options: Any) -> LLM:
    """The embedded model with a draft model that runs at any cost."""
    llm = LLM(draft_model=draft_model, **options)
    make_rows_free(llm.engine)
    return llm


def watch(llm: LLM) -> list[StepPlan]:
    """The plans that the draft model runs."""
    assert llm.engine._speculation is not None
    assert llm.engine._speculation._proposer is not None
    runner, plans = llm.engine._speculation._proposer._runner, []
    run = runner.run

    def watched(plan: StepPlan) -> StepTokens:
        plans.append(plan)
        return run(plan)

    runner.run = watched  # type: ignore[method-assign]
    return plans


@pytest.fixture(scope="session")
def weak_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the embedded model with noise in its weights, which is often wrong."""
    folder = tmp_path_factory.mktemp("weak")
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3 * parameter.std())
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.thorough("0.0")
def test_the_same_model_drafts_everything(temperature: float) -> None:
    """At any temperature: it takes the random number that the model will take."""
    params = SamplingParams(temperature=temperature, top_p=0.95, seed=1, max_tokens=100, logprobs=2, ignore_eos=True)
    prompts = ["Once upon a time", "Tom had a red ball. " * 20]
    llm = drafted(speculation="draft")
    outputs = generate(llm, prompts, [params] * 2)
    for output, wanted in zip(outputs, generate(LLM(speculation="off"), prompts, [params] * 2), strict=True):
        assert said(output) == said(wanted)
        assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens > 80
    assert llm.engine.stats().num_steps < 12


@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 32, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 24}],
    ids=["roomy", "preemption"],
)
@pytest.mark.parametrize("is_weak", [False, True], ids=["strong", "weak"])
@pytest.mark.thorough
def test_random_requests_do_not_notice_a_draft(options: dict[str, Any], is_weak: bool, weak_draft: Path) -> None:
    prompts, params = random_requests(NUM_REQUESTS, f"draft {is_weak} {options}")
    expected = generate(LLM(**options, speculation="off"), prompts, params)
    llm = drafted(weak_draft if is_weak else DEMO_MODEL, **options)
    for _ in range(2):
        for output, wanted in zip(generate(llm, prompts, params), expected, strict=True):
            assert said(output) == said(wanted)
    stats = llm.engine.stats()
    assert stats.num_accepted_tokens > 100
    assert (stats.num_accepted_tokens < stats.num_draft_tokens) or not is_weak
    assert bool(stats.num_preemptions) == bool(options)
    llm.engine.scheduler.block_pool.check([])


def test_the_draft_computes_only_what_lay_beyond_the_blocks_twice() -> None:
    llm = drafted(speculation="draft")
    plans = watch(llm)
    (output,) = generate(llm, ["Tom had a red ball. " * 20], [SamplingParams(temperature=0, max_tokens=50)])
    spans = [(span.start, span.end) for plan in plans for span in plan.spans]
    ends = [end for _, end in spans]
    assert spans[0][0] == 0
    for (start, _), end in zip(spans[1:], ends, strict=False):
        assert start in (end, end - 1) or start % llm.engine.config.kv_cache.block_size == 0
    assert ends[-1] < len(output.prompt_token_ids) + len(output.outputs[0].token_ids)


def test_a_prefix_that_the_draft_has_seen_is_not_computed_again() -> None:
    llm = drafted(speculation="draft")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (first,) = generate(llm, ["Tom had a red ball. " * 20 + "Then"], [params])
    plans = watch(llm)
    (second,) = generate(llm, ["Tom had a red ball. " * 20 + "One day"], [params])
    num_computed = sum(plan.num_tokens for plan in plans)
    assert second.metrics.num_cached_tokens > 100
    assert num_computed < len(second.prompt_token_ids) - second.metrics.num_cached_tokens + 40
    assert first.prompt_token_ids[:100] == second.prompt_token_ids[:100]


def test_a_draft_that_fails_is_not_asked_again() -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    llm = drafted(speculation="draft")
    num_calls = []

    def fail(plan: StepPlan) -> StepTokens:
        num_calls.append(plan.num_tokens)
        raise RuntimeError("out of memory")

    llm.engine._speculation._proposer._runner.run = fail  # type: ignore[union-attr, method-assign]
    (output,) = generate(llm, ["Once upon a time"], [params])
    (wanted,) = generate(LLM(speculation="off"), ["Once upon a time"], [params])
    assert said(output) == said(wanted)
    assert len(num_calls) == 1


def test_windows_of_the_model_and_of_the_draft(tmp_path: Path) -> None:
    """A model with layers that keep a window, and a draft that has them, too."""
    model, tokenizer = zoo.build("gemma2"), byte_level().inner
    model.save_pretrained(tmp_path)
    prompts = [{"prompt_token_ids": [(7 * each + place) % 250 for place in range(30 + each)]} for each in range(6)]
    params = SamplingParams(temperature=0, max_tokens=60, logprobs=2, ignore_eos=True)
    options: dict[str, Any] = {"max_num_seqs": 4, "dtype": "float32"}
    expected = LLM(copy.deepcopy(model), tokenizer, **options, speculation="off").generate(
        prompts, params, use_tqdm=False
    )
    llm = LLM(model, tokenizer, **options, draft_model=tmp_path, speculation="draft")
    make_rows_free(llm.engine)
    for output, wanted in zip(llm.generate(prompts, params, use_tqdm=False), expected, strict=True):
        assert said(output) == said(wanted)
        assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens > 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_model": "/nowhere"}, "draft_model: there is no model folder '/nowhere'"),
        ({"speculation": "draft"}, "speculation is 'draft', but there is no draft_model"),
        ({"draft_model": "x", "speculation": "off"}, "there is a draft_model, but speculation is 'off'"),
        ({"draft_model": 5}, "draft_model is 5; it must be a hub id, a folder, or 'mtp'"),
    ],
    ids=["no such folder", "no draft", "off", "a number"],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelError, ValueError)) as caught:
        LLM(**options)
    assert message in str(caught.value)


def test_a_draft_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    zoo.build("gpt2").save_pretrained(tmp_path)
    byte_level().inner.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="draft_model has another tokenizer"):
        LLM(draft_model=tmp_path)


class Wrong:
    """Always chooses the same token."""

    def run(self, plan: StepPlan) -> StepTokens:
        return [SpanTokens([7] * span.num_logit_rows) for span in plan.spans]


def test_a_draft_that_is_wrong_is_trusted_less_and_in_the_end_again() -> None:
    proposer = DraftModelProposer(Wrong(), DraftLayout(0, 8, 16, 1, 4), 1, 64, 1000, 100)
    candidate = Candidate(0, [1, 2], 1, 4, block_tables=(array("i", [0, 1]),))
    chances = [proposer.chance(candidate)]
    for _ in range(18):
        assert proposer.propose([candidate], 2)[0].token_ids == [7, 7]
        candidate = candidate._replace(token_ids=[*candidate.token_ids, 9])
        chances.append(proposer.chance(candidate))
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] < 0.3 < chances[0]
    for _ in range(3000):
        proposer.do_without()
    assert proposer.chance(candidate._replace(sequence_id=1)) > 0.6
