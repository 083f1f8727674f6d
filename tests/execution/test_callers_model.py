"""A caller's model stays unchanged after preparation, after a run, and after a failed step."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from inflight import LLM, SamplingParams
from inflight.contracts.api.config import EngineConfig
from inflight.execution.hf.load import load_model
from inflight.execution.hf.model_call import ModelCall
from tests import zoo
from tests.execution.packed_steps import assert_packed_is_plain, packed_executor, packed_logits
from tests.execution.prepared_models import every_architecture, plain_logits


def use(model: PreTrainedModel) -> None:
    """Prepare a model, and run it through an engine."""
    llm = LLM(model, num_blocks=64, block_size=8)
    llm.generate(zoo.sample_sequences(), SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "phi3_longrope", "stablelm", "gpt2"])
def test_a_callers_model_works_as_before(name: str, implementation: str) -> None:
    if name == "gpt_oss" and implementation == "sdpa":
        pytest.skip("transformers has no sdpa for GPT-OSS")
    model = zoo.draw(name, zoo.FACTORS[name], seed=0)
    model.set_attn_implementation(implementation)
    expected, random_state = plain_logits(model), torch.random.get_rng_state()
    use(model)
    assert torch.equal(plain_logits(model), expected)
    assert model.config._attn_implementation == implementation
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.random.get_rng_state(), random_state)


@every_architecture
@pytest.mark.thorough("llama", "gpt2")
def test_a_callers_model_can_still_be_trained(name: str) -> None:
    """The model keeps no tensor that was created in inference mode."""
    model = zoo.draw(name, zoo.FACTORS[name], seed=0)
    use(model)
    model.requires_grad_(True)
    model(torch.tensor(zoo.sample_sequences()[:1]), use_cache=False).logits.square().mean().backward()
    assert model.get_input_embeddings().weight.grad.norm() > 0


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_callers_model_can_still_be_copied(copied: Callable[[PreTrainedModel], PreTrainedModel]) -> None:
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0)
    use(model)
    assert torch.equal(plain_logits(copied(model)), plain_logits(model))


def test_a_model_is_unchanged_after_a_failed_step() -> None:
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0)
    expected = plain_logits(model)
    executor = packed_executor(model)
    with pytest.raises(IndexError):
        packed_logits(executor, [[zoo.VOCAB_SIZE + 1]])
    assert model.config._attn_implementation == "eager"
    assert torch.equal(plain_logits(model), expected)
    assert_packed_is_plain(model, packed_logits(executor, zoo.sample_sequences()), zoo.sample_sequences())


class PassesOn(LlamaForCausalLM):
    """Names no argument but its tokens."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids=input_ids, **kwargs)


class NamedPast(LlamaForCausalLM):
    """Takes its cache under another name than the one under which it is returned, and ignores what it does not know."""

    def forward(self, input_ids: Any = None, past: Any = None, use_cache: Any = None, **_: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids=input_ids, past_key_values=past, use_cache=use_cache)


class ReturnsOnly(LlamaForCausalLM):
    """Returns a cache, and takes none."""

    def forward(self, input_ids: Any = None, use_cache: Any = None, return_dict: Any = None) -> Any:  # type: ignore[override]
        return super().forward(input_ids=input_ids, use_cache=use_cache)


def timed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as people write them."""

    def timed_forward(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return timed_forward


def decorated(config: Any) -> PreTrainedModel:
    model = LlamaForCausalLM(config)
    model.forward = timed(model.forward)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("make", "executor"),
    [(PassesOn, "packed"), (decorated, "packed"), (NamedPast, "sequential"), (ReturnsOnly, "sequential")],
)
def test_a_forward_that_hides_its_cache_gives_no_wrong_token(
    make: Callable[[Any], PreTrainedModel], executor: str
) -> None:
    plain = zoo.build("llama")
    model = make(plain.config)
    model.load_state_dict(plain.state_dict())
    llm = LLM(model.eval(), block_size=4, max_num_batched_tokens=16)
    assert llm.model_info.executor == executor
    prompts = zoo.sample_sequences()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [zoo.plain_greedy(plain, prompt, 8) for prompt in prompts]


def test_a_cache_has_the_name_of_later_versions() -> None:
    class NamedCache(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, cache: Any = None, **_: Any) -> Any:  # type: ignore[override]
            return super().forward(input_ids=input_ids)

    assert ModelCall(NamedCache(zoo.build("llama").config)).cache_name == "cache"


def test_a_decorated_forward_runs_the_copy() -> None:
    """The engine changes the copy of the model that runs."""
    model = decorated(zoo.build("llama").config)
    own = load_model(model, EngineConfig())
    with torch.no_grad():
        own.lm_head.weight = torch.nn.Parameter(torch.zeros_like(own.lm_head.weight))
        assert own(torch.tensor([[1, 2]])).logits.abs().max() == 0
        assert model(torch.tensor([[1, 2]])).logits.abs().max() > 0
