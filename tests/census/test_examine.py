"""Examining one class at a time: tiny configurations, sensitive models, and findings that distinguish right from
wrong."""

from typing import Any

import pytest
import torch

from inflight.census import examine as examining
from inflight.census.examine import examine, misplaced, requests_for
from inflight.census.sensitive import build, measure, plain_logits, sensitive_model, vocab_size
from inflight.census.tiny_configs import NUM_LAYERS, model_class, tiny_config
from inflight.entrypoints.llm import LLM
from inflight.execution.executors import PackedExecutor

FAMILIES = ("gpt2", "bloom", "mamba", "deepseek_v3", "bert", "gemma3", "mllama", "qwen3_next")
"""Classes with old attention, recurrent or latent states, bidirectional defaults, larger parents, or several kinds of
layers."""


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.thorough("gpt2", "bert")
def test_a_tiny_model_is_built_and_sensitive(model_type: str) -> None:
    model, sensitivity = sensitive_model(model_class(model_type), tiny_config(model_type))
    assert model.num_parameters() < 1_000_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert sensitivity.suffices, sensitivity


def test_a_tiny_model_keeps_layers_of_all_kinds() -> None:
    assert tiny_config("qwen3_next").layer_types == ["linear_attention", "full_attention"] * 2
    assert len(tiny_config("gemma3").get_text_config().layer_types) == NUM_LAYERS


def test_a_model_that_is_not_tiny_is_not_built() -> None:
    config = tiny_config("llama")
    config.vocab_size = 10_000_000
    with pytest.raises(ValueError, match=r"not tiny: 1,280,\d+,\d+ parameters"):
        build(model_class("llama"), config)


def test_models_are_reproducible() -> None:
    first, second = (sensitive_model(model_class("gpt2"), tiny_config("gpt2")) for _ in range(2))
    assert first[1] == second[1]
    assert all(torch.equal(a, b) for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True))


def test_a_model_with_default_initialisation_is_not_sensitive() -> None:
    """This is why models are rescaled: the measure distinguishes such a model from a sensitive one."""
    model = build(model_class("gpt2"), tiny_config("gpt2"))
    assert not measure(model, 1.0).suffices


def test_gpt2_is_exact_and_packed_through_chunks_and_preemptions() -> None:
    finding, model = examine("gpt2")
    assert (finding.outcome, finding.executor, finding.reason) == ("exact", "packed", "")
    assert model is not None
    assert finding.num_parameters == model.num_parameters()
    assert finding.num_tokens >= 8 * 12
    assert finding.num_preemptions > 0
    assert finding.share_changed > 0.4


def test_a_model_that_runs_incorrectly_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is wrong only after it was loaded and proved, and only if several sequences decode together."""
    real_forward = PackedExecutor.forward

    class WrongLater(LLM):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            monkeypatch.setattr(PackedExecutor, "forward", forward)

    def forward(self: PackedExecutor, batch: Any) -> torch.Tensor:
        logits = real_forward(self, batch)
        return logits.roll(1, 0) if len(logits) > 2 else logits

    monkeypatch.setattr(examining, "LLM", WrongLater)
    finding, _ = examine("gpt2")
    assert (finding.outcome, finding.executor) == ("wrong", "packed")
    assert "of 8 requests: " in finding.reason
    assert "from output token" in finding.reason


def test_wrong_attention_is_found_by_the_judge() -> None:
    """The attention behaves as if blocks were lost, so the plain model rejects tokens that depend on a wrong far
    context."""
    model, _ = sensitive_model(model_class("llama"), tiny_config("llama"))
    request = requests_for(model)[1]
    lost = [*request.prompt[:8], *reversed(request.prompt[8:24]), *request.prompt[24:]]
    tokens: list[int] = []
    for _ in range(12):
        tokens.append(int(plain_logits(model, torch.tensor([lost + tokens]))[0, -1].argmax()))
    assert misplaced(model, lost, tokens) == ([], 0)
    places, _ = misplaced(model, request.prompt, tokens)
    assert len(places) > 3


def test_a_class_that_is_not_a_causal_language_model_is_reported_as_such() -> None:
    finding, _ = examine("cpmant")
    assert (finding.outcome, finding.executor) == ("not causal", None)
    assert finding.reason == "what follows a token changes its logits"
    assert examine("gemma4_assistant")[0].outcome == "not causal"


def test_a_class_that_cannot_be_built_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model_type: str) -> None:
        raise TypeError(f"{model_type} wants more\nthan that")

    monkeypatch.setattr(examining, "tiny_config", fails)
    finding, model = examine("gpt2")
    assert (finding.outcome, finding.reason, model) == ("not built", "TypeError: gpt2 wants more than that", None)


def test_a_model_that_the_engine_refuses_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise ValueError("it is too odd")

    monkeypatch.setattr(examining, "LLM", refuses)
    finding, _ = examine("gpt2")
    assert (finding.outcome, finding.reason, finding.executor) == ("refused", "it is too odd", None)


def test_requests_have_all_lengths() -> None:
    model = build(model_class("gpt2"), tiny_config("gpt2"))
    requests = requests_for(model)
    assert requests == requests_for(model)
    assert {1, 60} <= {len(each.prompt) for each in requests}
    assert all(12 <= each.num_tokens <= 20 for each in requests)
    assert requests[1].prompt[:20] == requests[-1].prompt[:20] != requests[2].prompt[:20]
    assert max(max(each.prompt) for each in requests) < vocab_size(model)
