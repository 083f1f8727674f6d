"""A plan is complete: recorded plans give the same tokens on another runner, and nothing is kept for sequences that
have ended."""

import gc
import pickle
import random
import weakref
from array import array
from typing import Any

import pytest
import torch

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.plan import StepPlan, StepTokens
from inflight.engine.engine import Engine
from inflight.execution.hf.model_call import ModelCall
from inflight.execution.model_runner import ModelRunner
from tests import others, zoo
from tests.text.tokenizers_for_tests import byte_level

OPTIONS: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 30,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "policy": "priority",
    "aging_steps": 20,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.9, "n": 3},
    {"temperature": 1.2, "seed": 7, "top_p": 0.9, "frequency_penalty": 0.8},
    {"temperature": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 0.8, "top_k": 20, "min_tokens": 6, "logit_bias": {5: 3.0}, "bad_words": ["a", "bc"]},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.7, "prompt_logprobs": 1, "logprobs": 0},
]


def record(engine: Engine) -> tuple[list[bytes], list[StepTokens]]:
    """Record every plan of an engine as bytes from now on, with its results."""
    plans: list[bytes] = []
    given: list[StepTokens] = []
    run = engine.runner.run

    def recorded(plan: StepPlan, masks: Any) -> StepTokens:
        plans.append(pickle.dumps(plan))
        given.append(run(plan, masks))
        return given[-1]

    engine.runner.run = recorded  # type: ignore[method-assign]
    return plans, given


def serve(engine: Engine, num_requests: int = 18) -> None:
    """Serve requests of all kinds with common prefixes; one is aborted while it runs."""
    rng = random.Random(0)
    prefix = [rng.randrange(zoo.VOCAB_SIZE) for _ in range(10)]
    for number in range(num_requests):
        prompt = prefix[: rng.choice((0, 8, 10))] + [rng.randrange(zoo.VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        params = SamplingParams(max_tokens=rng.randint(6, 16), ignore_eos=True, **KINDS[number % len(KINDS)])
        engine.submit(engine.inputs.accept(str(number), prompt, params, priority=rng.randint(0, 2)))
        if number % 3 == 0:
            engine.step()
        if number == 9:
            engine.abort("8")
    while engine.has_unfinished_requests:
        engine.step()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_pickled_plans_give_the_same_tokens_on_a_fresh_runner(name: str) -> None:
    model = zoo.build(name)
    engine = Engine(model, EngineConfig(**OPTIONS), byte_level())
    plans, given = record(engine)
    serve(engine)
    stats, unpickled = engine.stats(), [pickle.loads(plan) for plan in plans]
    assert stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    assert any(plan.copies for plan in unpickled), "a fork copied a block"
    fresh = ModelRunner(model, EngineConfig(**OPTIONS))
    assert [fresh.run(plan) for plan in unpickled] == given


def test_a_plan_is_plain_data() -> None:
    """A pickled plan refers only to the contract classes, and to no scheduler, request or tensor."""
    engine = Engine(zoo.build("llama"), EngineConfig(**OPTIONS), byte_level())
    plans, _ = record(engine)
    serve(engine, 6)
    assert max(map(len, plans)) < 20_000
    allowed = {array, tuple, list, int, float, str, dict, frozenset, type(None), bool}
    todo: list[Any] = [pickle.loads(plan) for plan in plans]
    while todo:
        each = todo.pop()
        if type(each).__module__.startswith("inflight.contracts."):
            todo += [getattr(each, slot) for slot in type(each).__slots__]
        else:
            assert type(each) in allowed
            todo += each.values() if isinstance(each, dict) else each if isinstance(each, list | tuple) else ()


@pytest.mark.parametrize("name", ["rwkv", "gpt2"])
@pytest.mark.thorough
def test_no_cache_is_kept_for_sequences_that_have_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one model-owned cache per running sequence, and none after the last has ended, unless later requests may
    continue it."""
    caches: list[weakref.ref[Any]] = []
    cache_of = ModelCall.cache_of

    def watched(call: ModelCall, outputs: Any) -> Any:
        cache = cache_of(call, outputs)
        tensors = cache if isinstance(cache, list | tuple) else [cache]
        caches.extend(weakref.ref(each) for each in tensors[:1])
        return cache

    model = zoo.build(name) if name == "gpt2" else others.build(name)
    config = EngineConfig(executor="sequential", max_num_seqs=4, num_blocks=200, enable_prefix_caching=False)
    engine = Engine(model, config)
    monkeypatch.setattr(ModelCall, "cache_of", watched)

    def num_held() -> int:
        gc.collect()
        return len({id(cache) for each in caches if (cache := each()) is not None})

    for number, max_tokens in enumerate((2, 4, 9)):
        engine.submit(
            engine.inputs.accept(
                str(number), [3, 1, 4, 1 + number], SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            )
        )
    held = []
    while engine.has_unfinished_requests:
        engine.step()
        held.append(num_held())
    assert held[0] == 3
    assert held[6] == 1, "the step after a sequence has ended"
    assert held[-1] == 0


def test_rows_keep_no_gathered_keys_for_sequences_that_have_ended() -> None:
    engine = Engine(others.build("bloom"), EngineConfig(executor="rows", max_num_seqs=4, num_blocks=200))
    engine.submit(engine.inputs.accept("0", [3, 1, 4], SamplingParams(max_tokens=5, ignore_eos=True)))
    before = num_bytes_of_tensors()
    while engine.has_unfinished_requests:
        engine.step()
    assert num_bytes_of_tensors() <= before


def num_bytes_of_tensors() -> int:
    gc.collect()
    held = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    tensors = {each.data_ptr(): each.nbytes for each in held if each.layout is torch.strided}
    return sum(tensors.values())


def test_samplers_keep_nothing_for_sequences_that_have_ended() -> None:
    engine = Engine(zoo.build("llama"), EngineConfig(**OPTIONS), byte_level())
    serve(engine)
    assert not engine.runner.sampler._adjusters
    assert not engine.runner.sampler._is_adjusted.any()
    assert not engine.runner.scorer.is_needed
