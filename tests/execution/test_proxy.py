"""A proxy is small for a model of any size, and of the same kind."""

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from inflight.contracts.api.errors import ModelError
from inflight.execution.hf.model_class import auto_class_of
from inflight.execution.preparation.proof import NotCausalError
from inflight.execution.preparation.proxy import ENOUGH, make_proxy
from tests import others, zoo
from tests.execution.prepared_models import default_model, tiny


@pytest.fixture
def of_real_size(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model with the default configuration of its class, without weights; it claims to be on a CPU."""
    with torch.device("meta"):
        config = AutoConfig.for_model(request.param)
        model = auto_class_of(config).from_config(config).eval()
    monkeypatch.setattr(type(model), "device", torch.device("cpu"))
    return model


@pytest.mark.parametrize(
    "of_real_size",
    [
        *("llama", "falcon", "gpt_oss", "gemma4_text", "mamba", "mamba2", "falcon_h1", "deepseek_v3", "helium"),
        *("codegen", "gemma3n_text", "pegasus", "xlstm", "zamba", "mistral3", "qwen3_vl"),
    ],
    indirect=True,
)
@pytest.mark.thorough("llama", "mamba]", "deepseek")
def test_models_of_real_sizes_have_small_twins(of_real_size: PreTrainedModel) -> None:
    proxy = make_proxy(of_real_size)
    assert sum(weight.numel() for weight in proxy.model.parameters()) < 180_000_000
    assert {weight.dtype for weight in proxy.model.parameters()} == {torch.float32}
    assert type(proxy.model) is type(of_real_size)
    assert {type(module) for module in proxy.model.modules()} == {type(module) for module in of_real_size.modules()}
    assert proxy.effect is not None
    assert proxy.effect >= ENOUGH


def test_layers_of_all_kinds_are_kept() -> None:
    """Gemma 3 keeps its first layer with full attention, DeepSeek-V3 its first layer with experts."""
    for name in ("gemma3", "qwen3_next", "deepseek_v3", "gemma4"):
        model = (zoo if name in zoo.ARCHITECTURES else others).build(name)
        config, proxies = model.config.get_text_config(), make_proxy(model).model.config.get_text_config()
        assert set(getattr(proxies, "layer_types", None) or ()) == set(getattr(config, "layer_types", None) or ())
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    model = default_model(tiny("deepseek_v3", num_hidden_layers=6, first_k_dense_replace=4, **experts))
    assert make_proxy(model).model.config.num_hidden_layers == 5


def test_the_configuration_of_the_model_is_not_changed() -> None:
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0)
    before = model.config.to_dict()
    make_proxy(model)
    assert model.config.to_dict() == before


def test_a_model_that_is_not_a_causal_language_model_has_no_twin() -> None:
    model = default_model(tiny("bert", is_decoder=False, intermediate_size=96))
    with pytest.raises(NotCausalError, match="BertLMHeadModel is no causal language model"):
        make_proxy(model)


def test_a_model_that_ignores_its_context_cannot_be_proved() -> None:
    model = others.build("bloom")

    class Mute(type(model)):  # type: ignore[misc]
        def forward(self, *args: object, **kwargs: object) -> object:
            given = super().forward(*args, **kwargs)
            given.logits = given.logits[:, :1].expand_as(given.logits)
            return given

    mute = Mute(model.config).eval()
    with pytest.raises(ModelError, match="no small float32 copy of Mute can be made"):
        make_proxy(mute)
