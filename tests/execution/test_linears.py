"""Prepacked linear layers compute the same function, and their weights are stored only once."""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from inflight import LLM, SamplingParams
from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.engine.engine import Engine
from inflight.execution.grouped.rounding import rounded_channels
from inflight.execution.kernels import has_panels
from inflight.execution.weights import int8_linear
from inflight.execution.weights.experts import prepack_experts, prepack_routers
from inflight.execution.weights.formats import INT8, PLAIN
from inflight.execution.weights.int8_linear import Int8OneDnnLinear, Int8PanelLinear, sums_int8
from inflight.execution.weights.layers import RowActivation, SiblingLinear
from inflight.execution.weights.linear_calls import LinearCalls, is_linear, watch_linears
from inflight.execution.weights.linears import prepack_linears
from inflight.execution.weights.onednn import OneDnnLinear
from inflight.execution.weights.panels import PanelLinear
from inflight.execution.weights.prepacked_linear import PrepackedEmbedding, PrepackedLinear, WeightLayout
from tests import zoo
from tests.execution import this_cpu

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(64, 64), (300, 96), (33, 40), (256, 64), (96, 768), (70, 33)]
KINDS = [PanelLinear, OneDnnLinear]
INT8_KINDS = [Int8PanelLinear, Int8OneDnnLinear]


def needs(kind: type[PrepackedLinear], dtype: torch.dtype) -> None:
    if issubclass(kind, PanelLinear) and not has_panels(dtype):
        pytest.skip("this CPU has no instructions for it")
    if kind in INT8_KINDS and not sums_int8(kind):
        pytest.skip("oneDNN's sums of int8 overflow on this CPU")
    if kind is OneDnnLinear and dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    this_cpu.needs(dtype)


def random_weight(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def watch(model: nn.Module) -> LinearCalls:
    """How one forward pass of a zoo model uses its linear layers."""
    with torch.inference_mode(), watch_linears(model) as calls:
        model(torch.arange(20)[None], use_cache=False)
    return calls


# ------------------------------------------------------------------------------------ one layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 33, 150])
def test_a_prepacked_layer_matches_the_original_layer(
    kind: type[PrepackedLinear], shape: tuple[int, int], dtype: torch.dtype, num_rows: int
) -> None:
    needs(kind, dtype)
    weight, bias = random_weight(shape, dtype), random_weight((1, shape[0]), dtype)[0]
    x = random_weight((num_rows, shape[1]), dtype)[None]
    actual = kind(weight, bias)(x)
    assert actual.shape == (1, num_rows, shape[0])
    assert actual.dtype == dtype
    if num_rows:
        expected = functional.linear(x.double(), weight.double(), bias.double())
        assert relative_error(actual, expected) < (1e-6 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("kind", KINDS + INT8_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh")])
def test_an_activation_can_be_part_of_the_layer(
    activation: nn.Module, dtype: torch.dtype, kind: type[PrepackedLinear]
) -> None:
    needs(kind, dtype)
    if kind in INT8_KINDS:
        needs(kind, torch.int8)
    weight, x = random_weight((50, 64), dtype), random_weight((5, 64), dtype)
    name = {"ReLU": "relu", "SiLU": "swish"}.get(type(activation).__name__, "gelu")
    layer = kind(weight, None, name, getattr(activation, "approximate", "none"))
    expected = activation(functional.linear(x.double(), weight.double()))
    tolerance = 3e-2 if kind in INT8_KINDS else 1e-6 if dtype == torch.float32 else 5e-3
    assert relative_error(layer(x), expected) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [PanelLinear, Int8PanelLinear])
@pytest.mark.parametrize("shape", SHAPES)
def test_panels_give_a_row_the_same_bits_in_any_batch(
    shape: tuple[int, int], kind: type[PanelLinear], dtype: torch.dtype
) -> None:
    needs(kind, torch.int8 if kind is Int8PanelLinear else dtype)
    this_cpu.needs(dtype)
    layer = kind(random_weight(shape, dtype), None)
    x = random_weight((200, shape[1]), dtype)
    together = layer(x)
    for first, last in ((0, 1), (3, 5), (60, 69), (100, 117), (7, 200)):
        assert torch.equal(layer(x[first:last]), together[first:last])


@pytest.mark.parametrize(("kind", "num_inputs"), [(PanelLinear, 2202), (Int8PanelLinear, 4404)])
def test_rows_that_are_too_long_for_a_cache_have_the_same_bits_and_are_right(
    kind: type[PrepackedLinear], num_inputs: int
) -> None:
    """With a matrix unit the first 256 of these rows go through many panels in blocks of inputs, the others do not."""
    needs(kind, torch.bfloat16)
    weight, x = random_weight((900, num_inputs), torch.bfloat16).split([600, 300])
    layer = kind(weight, None)
    together = layer(x)
    assert torch.equal(together[250:], layer(x[250:]))
    assert torch.equal(together[7:8], layer(x[7:8]))
    assert relative_error(together, x.double() @ weight.double().T) < 0.02


@pytest.mark.parametrize("kind", INT8_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_close_and_rows_are_independent(
    shape: tuple[int, int], dtype: torch.dtype, kind: type[PrepackedLinear]
) -> None:
    needs(kind, torch.int8)
    this_cpu.needs(dtype)
    weight, bias = random_weight(shape, dtype), random_weight((1, shape[0]), dtype)[0]
    x = random_weight((9, shape[1]), dtype)
    layer = kind(weight, bias)
    expected = functional.linear(x.double(), weight.double(), bias.double())
    assert relative_error(layer(x), expected) < 3e-2
    beside = torch.cat([x[:3], 1000 * x[3:]])
    assert torch.equal(layer(beside)[:3], layer(x)[:3])
    assert torch.equal(layer(x[:1]), layer(x)[:1])


@pytest.mark.parametrize("kind", INT8_KINDS)
def test_rounded_activations_keep_non_finite_values_within_their_row(kind: type[PrepackedLinear]) -> None:
    needs(kind, torch.int8)
    layer = kind(random_weight((64, 64), torch.float32), None)
    x = random_weight((3, 64), torch.float32)
    expected = layer(x)
    for bad in (float("nan"), float("inf")):
        broken = x.clone()
        broken[1, 7] = bad
        actual = layer(broken)
        assert actual[1].isnan().all()
        assert torch.equal(actual[[0, 2]], expected[[0, 2]])


def test_weights_are_rounded_to_the_nearest_quantised_value() -> None:
    weight = random_weight((50, 96), torch.float32)
    weight[7] = 0
    rounded, scales = rounded_channels(weight)
    assert rounded.abs().max() == 127
    assert ((weight - rounded * scales[:, None]).abs() <= scales[:, None] / 2 + 1e-7).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 33)])
def test_the_layout_finds_every_element(
    shape: tuple[int, int], dtype: torch.dtype, kind: type[PrepackedLinear]
) -> None:
    needs(kind, dtype)
    weight = random_weight(shape, dtype)
    layer = kind(weight, None)
    layout = layer.layout()
    assert isinstance(layout, WeightLayout)
    assert torch.equal(layout.elements[layout.row_places[:, None] + layout.column_places], weight)


# ------------------------------------------------------------------------------------ whole models


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_a_prepacked_model_matches_the_original_model(name: str) -> None:
    """In float32, rounding explains almost no difference. Every linear layer and expert is replaced."""
    model, tokens = copy.deepcopy(zoo.build(name)), torch.arange(40)[None] % zoo.VOCAB_SIZE
    calls = watch(model)
    with torch.inference_mode():
        expected = model(tokens, use_cache=False).logits
        prepack_experts(model)
        prepack_linears(model, calls)
        prepack_routers(model)
        actual = model(tokens, use_cache=False).logits
    assert relative_error(actual, expected) < 1e-5
    assert not any(is_linear(module) for module in model.modules())
    assert not any(parameter.dim() > 2 for parameter in model.parameters())


def test_layers_that_can_be_merged_are_found_by_observation() -> None:
    llama, gpt2 = watch(zoo.build("llama")), watch(zoo.build("gpt2"))
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    assert llama.siblings[0] == (f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj")
    assert llama.siblings[1] == (f"{mlp}gate_proj", f"{mlp}up_proj")
    assert not llama.activations
    assert gpt2.activations["transformer.h.0.mlp.c_fc"] == "transformer.h.0.mlp.act"
    assert not gpt2.siblings


def test_siblings_and_activations_are_replaced() -> None:
    model = copy.deepcopy(zoo.build("llama"))
    prepack_linears(model, watch(model))
    assert isinstance(model.model.layers[0].self_attn.k_proj, SiblingLinear)
    assert isinstance(model.model.layers[0].mlp.act_fn, RowActivation)
    model = copy.deepcopy(zoo.build("gpt2"))
    prepack_linears(model, watch(model))
    assert model.transformer.h[0].mlp.c_fc.activation == "gelu"
    assert isinstance(model.transformer.h[0].mlp.act, nn.Identity)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
def test_a_tied_embedding_reads_the_head(name: str, quantized: bool) -> None:
    """Gemma's embedding is a subclass that scales its result."""
    if quantized:
        this_cpu.needs(torch.int8)
    model = copy.deepcopy(zoo.build(name))
    embedding, tokens = model.get_input_embeddings(), torch.arange(zoo.VOCAB_SIZE).view(2, -1)
    expected = embedding(tokens)
    weight = weakref.ref(embedding.weight)
    prepack_linears(model, watch(model), INT8 if quantized else PLAIN)
    gc.collect()
    assert isinstance(embedding, PrepackedEmbedding)
    assert weight() is None, "the plain weight is still there"
    actual = embedding(tokens)
    assert torch.equal(actual, expected) if not quantized else relative_error(actual, expected) < 1e-2
    assert actual.dtype == expected.dtype


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_our_own_activations_match_torch(activation: nn.Module, dtype: torch.dtype) -> None:
    """Rows are strided, and their width is not a multiple of a vector. An element has the same bits in any position."""
    wide = (random_weight((7, 100), dtype) * 4)[None]
    x = wide[..., 3:50]
    name = {"ReLU": "relu", "SiLU": "swish"}.get(type(activation).__name__, "gelu")
    actual = torch.ops.inflight.activate(x, name, getattr(activation, "approximate", "none"))
    expected = activation(x.double())
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    alone = torch.ops.inflight.activate(x[:, 2:3, 40:].contiguous(), name, getattr(activation, "approximate", "none"))
    assert torch.equal(alone, actual[:, 2:3, 40:])


@pytest.mark.skipif(sums_int8(Int8OneDnnLinear), reason="on this CPU it would not")
def test_int8_is_refused_if_it_would_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_linear, "has_panels", lambda dtype: False)
    with pytest.raises(ModelError, match="a CPU that sums int8 in 32 bits"):
        Engine(zoo.build("llama"), EngineConfig(num_blocks=20, quantization="int8"))


def shared_block(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


def shared_layer(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.k_proj = model.model.layers[1].self_attn.v_proj


def hooked_linear(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda module, given, output: output * 2)


def hooked_input(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda module, given: (given[0] * 2,))


def hooked_activation(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda module, given, output: output * 2)


def own_forward(model: PreTrainedModel) -> None:
    layer = model.model.layers[1].mlp.down_proj
    layer.forward = lambda x: 2 * type(layer).forward(layer, x)


@pytest.mark.parametrize(
    "change", [shared_block, shared_layer, hooked_linear, hooked_input, hooked_activation, own_forward]
)
def test_layers_that_are_shared_or_watched_keep_what_they_do(change: Callable[[PreTrainedModel], None]) -> None:
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0)
    change(model)
    llm = LLM(model)
    assert llm.model_info.executor == "packed"
    prompts = zoo.sample_sequences()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [zoo.plain_greedy(model, prompt, 6) for prompt in prompts]
