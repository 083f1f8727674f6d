"""An encoder's linear layers are prepacked with its first image, if that changes no more than rounding."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from inflight import LLM, SamplingParams
from inflight.contracts.step.multimodal import EncoderInput
from inflight.execution.hf.model_class import encoders
from inflight.execution.multimodal import item_proofs, prepacking
from inflight.execution.multimodal.encoder import encode, rows_of
from inflight.execution.multimodal.prepacking import prepack_encoder, prepare_encoders
from inflight.execution.weights.layers import SiblingLinear
from inflight.execution.weights.prepacked_linear import PrepackedLinear, can_prepack
from inflight.text.processor import Processor
from tests.multimodal.models import image, with_processor

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def encoder_and_item(model_type: str, dtype: torch.dtype = torch.float32) -> tuple[Any, EncoderInput]:
    model, processor = with_processor(model_type)
    own = Processor(processor, model.config)
    _, inputs = own.read(own.of("image").placeholder, images=[image(1)])
    return copy.deepcopy(model).to(dtype), inputs.items[0]


def linears(model: Any) -> list[nn.Module]:
    modules = (module for each in encoders(model) for module in each.modules())
    return [each for each in modules if type(each) is nn.Linear or isinstance(each, PrepackedLinear | SiblingLinear)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llava", "idefics3", "gemma3"])
def test_layers_are_prepacked_and_give_the_same(model_type: str, dtype: torch.dtype) -> None:
    model, item = encoder_and_item(model_type, dtype)
    if not can_prepack(model):
        pytest.skip("no prepacked layers here")
    expected = rows_of(encode(*encoder_and_item(model_type)))[0]
    of_plain = (rows_of(encode(model, item))[0].float() - expected).abs().max()
    num_linears = len(linears(model))
    prepare_encoders(model)
    output, calls = prepack_encoder(model, lambda: encode(model, item))
    assert calls is not None
    assert len(linears(model)) == num_linears
    assert not [each for each in linears(model) if type(each) is nn.Linear]
    error = (rows_of(output)[0].float() - expected).abs().max()
    assert error <= 1.5 * of_plain + 1e-5 * expected.abs().max()
    again = rows_of(encode(model, item))[0]
    assert torch.equal(again, rows_of(output)[0])


def test_layers_stay_if_prepacking_would_change_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model, item = encoder_and_item("llava")
    expected = rows_of(encode(model, item))[0]
    before = [(each, dict(each._parameters)) for each in linears(model)]
    monkeypatch.setattr(prepacking, "are_alike", lambda rows, others: False)
    output, calls = prepack_encoder(model, lambda: encode(model, item))
    assert calls is None
    assert torch.equal(rows_of(output)[0], expected)
    assert [(each, dict(each._parameters)) for each in linears(model)] == before
    assert torch.equal(rows_of(encode(model, item))[0], expected)


def test_answers_are_those_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = with_processor("idefics3")
    prompts = [{"prompt": f"What is <image> {each}?", "images": [image(each)]} for each in range(4)]
    found = []
    for is_faster in (True, False):
        monkeypatch.setattr(item_proofs, "is_faster_prepacked", lambda model, is_faster=is_faster: is_faster)
        llm = LLM(copy.deepcopy(model), processor, block_size=4, num_blocks=200)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        found.append([each.outputs[0].token_ids for each in outputs])
        assert any(type(each) is nn.Linear for each in linears(llm.engine.runner.model)) != is_faster
    assert found[0] == found[1]


def test_layers_get_patches_one_after_the_other_and_give_the_same() -> None:
    model, item = encoder_and_item("idefics3")
    given: list[torch.Tensor] = []
    layer = next(each for each in encoders(model)[0].modules() if isinstance(each, nn.LayerNorm))
    layer.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    expected = rows_of(encode(model, item))[0]
    prepare_encoders(model)
    assert torch.equal(rows_of(encode(model, item))[0], expected)
    assert [each.is_contiguous() for each in given] == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("convolution", "sizes"),
    [
        (nn.Conv2d(3, 10, 4, stride=4), (2, 3, 12, 8)),
        (
            nn.Conv2d(3, 10, (4, 2), stride=(4, 2), bias=False, padding="valid"),
            (1, 3, 15, 9),
        ),  # of which ends are left out
        (nn.Conv3d(3, 10, (2, 4, 4), stride=(2, 4, 4), bias=False), (7, 3, 2, 4, 4)),
        (nn.Conv3d(2, 5, (1, 3, 2), stride=(1, 3, 2)), (2, 2, 3, 6, 4)),
        (nn.Conv2d(3, 10, 4, stride=4), (3, 12, 8)),
        (nn.Conv2d(3, 10, 4, stride=4, padding=1), (2, 3, 12, 8)),  # not side by side
        (nn.Conv2d(4, 8, 2, stride=2, groups=2), (1, 4, 6, 6)),
    ],
)
def test_a_convolution_over_patches_is_a_linear_layer(
    convolution: nn.Module, sizes: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = with_processor("llava")
    module, x = copy.deepcopy(convolution).to(dtype), torch.randn(sizes).to(dtype)
    expected = module(x)
    monkeypatch.setattr(prepacking, "encoders", lambda _: [module])
    prepare_encoders(model)
    found = module(x)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected)
    if vars(convolution).keys() != vars(module).keys():  # it has a `forward` of ours: also where torch runs in loops
        torch.testing.assert_close(prepacking._over_patches(module, True, x), expected)
