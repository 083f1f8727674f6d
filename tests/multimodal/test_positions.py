"""Models with positions in three dimensions (M-RoPE), and with outputs of several encoder layers (DeepStack). Their
processors need torchvision, so what they would give is written down here."""

import copy
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from inflight import LLM, SamplingParams
from inflight.contracts.step.multimodal import Array, EncoderInput, MultimodalInputs
from inflight.execution.hf.model_class import encoders
from inflight.execution.kernels import kernels_available
from inflight.execution.multimodal import placing
from tests.multimodal.models import plain_answer, tiny

BEGIN, PLACEHOLDER, END = 6, 5, 7
GRIDS = ((1, 4, 6), (1, 8, 4), (1, 2, 2))
"""Patches of each image, in time, height and width; four of them make a row of the encoder's output."""
PROMPTS: list[list[int]] = [[], [0], [1, 2], [0, 1, 0], [1], [0]]
ENDS_IN_AN_IMAGE = 4
SEEDS = (0, 1, 2, 3, ENDS_IN_AN_IMAGE, 1)
"""Of the prompts' other tokens."""
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
needs_kernels = pytest.mark.skipif(not kernels_available(), reason="graphs need a C++ compiler")


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    ids = {"image_token_id": PLACEHOLDER, "vision_start_token_id": BEGIN, "vision_end_token_id": END}

    def smaller(config: Any) -> None:
        if hasattr(config.vision_config, "deepstack_visual_indexes"):
            config.vision_config.deepstack_visual_indexes = [1, 2]

    return tiny(request.param, smaller, **ids, video_token_id=8)


def image(model: PreTrainedModel, number: int) -> dict[str, torch.Tensor]:
    """What a processor gives for an image."""
    config = model.config.vision_config
    width = 3 * config.temporal_patch_size * config.patch_size**2
    grid = torch.tensor([GRIDS[number]])
    generator = torch.Generator().manual_seed(number)
    return {"pixel_values": torch.randn(int(grid.prod()), width, generator=generator), "image_grid_thw": grid}


def prompt(numbers: list[int], seed: int) -> tuple[list[int], list[list[int]]]:
    """Token ids, and the places of each image's placeholders. Some end in an image."""
    draw = random.Random(seed)
    token_ids, places = [draw.randrange(20, 250) for _ in range(draw.randrange(3, 20))], []
    for number in numbers:
        first, length = len(token_ids) + 1, GRIDS[number][1] * GRIDS[number][2] // 4
        places.append(list(range(first, first + length)))
        token_ids += [BEGIN, *[PLACEHOLDER] * length, END, *(draw.randrange(20, 250) for _ in range(4))]
    return token_ids[: places[-1][-1] + 1] if seed == ENDS_IN_AN_IMAGE else token_ids, places


def as_arrays(tensors: dict[str, torch.Tensor]) -> dict[str, Array]:
    arrays = {name: each.numpy() for name, each in tensors.items()}
    return {name: Array(each.dtype.str, each.shape, each.tobytes()) for name, each in arrays.items()}


@pytest.mark.parametrize("has_kernels", [pytest.param(True, marks=needs_kernels), False])
def test_answers_are_those_of_the_plain_model(
    model: PreTrainedModel, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels by the graph, in all steps."""
    if not has_kernels:
        monkeypatch.setattr(placing, "kernels_available", lambda: False)
    llm = LLM(copy.deepcopy(model), max_num_batched_tokens=16, num_blocks=40, block_size=4, max_num_seqs=4)
    if has_kernels:
        monkeypatch.setattr(llm.engine.runner.require_packed(), "_forward", None)
    engine, expected, given = llm.engine, [], {str(index): list[int]() for index in range(len(PROMPTS))}
    for index, numbers in enumerate(PROMPTS):
        token_ids, places = prompt(numbers, SEEDS[index])
        images = [image(model, number) for number in numbers]
        whole = {"mm_token_type_ids": torch.tensor([[int(each == PLACEHOLDER) for each in token_ids]])}
        merged = {name: torch.cat([each[name] for each in images]) for name in (images[0] if images else ())}
        inputs = {"input_ids": torch.tensor([token_ids]), **whole, **merged}
        expected.append(plain_answer(copy.deepcopy(model), inputs, 10))
        whole.update({name: each for name, each in merged.items() if name == "image_grid_thw"})
        items = [
            EncoderInput("image", str(number).encode() * 32, own, as_arrays(each))
            for number, own, each in zip(numbers, places, images, strict=True)
        ]
        multimodal = MultimodalInputs(items, as_arrays(whole), as_arrays(merged)) if items else None
        engine.submit(engine.inputs.accept(str(index), token_ids, GREEDY, multimodal=multimodal))
    while engine.has_unfinished_requests:
        for output in engine.step():
            given[output.request_id] += output.new_token_ids
    assert list(given.values()) == expected
    assert len({tuple(each) for each in expected}) > 3


@pytest.mark.parametrize("has_kernels", [pytest.param(True, marks=needs_kernels), False])
def test_rows_of_several_layers_and_of_one_go_into_a_step(has_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image beside a sound (Qwen3-Omni)."""
    if not has_kernels:
        monkeypatch.setattr(placing, "kernels_available", lambda: False)
    own = placing.Placing(
        tiny("qwen3_vl", lambda config: setattr(config.vision_config, "deepstack_visual_indexes", [1]))
    )
    image, sound = (torch.full((2, 64), value) for value in (2.0, 3.0))
    own.put([({0: image, 1: image}, slice(2), torch.tensor([0, 1])), ({0: sound}, slice(1, 2), torch.tensor([3]))])
    for layer, expected in ((0, [2, 2, 1, 3]), (1, [3, 3, 1, 1]), (0, [1, 1, 1, 1]), (1, [1, 1, 1, 1])):
        states = torch.ones(4, 64)
        own.place(states, layer)
        assert states[:, 0].tolist() == expected == states[:, -1].tolist()


def test_an_encoder_keeps_its_frequencies_in_float32(model: PreTrainedModel) -> None:
    """As in `generate` of a checkpoint in bfloat16, whose frequencies are no weights."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    before = [each.clone() for encoder in encoders(model) for each in encoder.buffers()]
    engine: Any = LLM(model, num_blocks=40, block_size=4).engine
    token_ids, (places,) = prompt([0], seed=1)
    item = EncoderInput("image", b"0" * 32, places, as_arrays(image(model, 0)))
    types = {"mm_token_type_ids": torch.tensor([[int(each == PLACEHOLDER) for each in token_ids]])}
    whole = as_arrays({**types, "image_grid_thw": torch.tensor([GRIDS[0]])})
    engine.submit(engine.inputs.accept("0", token_ids, GREEDY, multimodal=MultimodalInputs([item], whole)))
    while engine.has_unfinished_requests:
        engine.step()
    after = [each for encoder in encoders(engine.runner.executor.model) for each in encoder.buffers()]
    assert {each.dtype for each in after} == {torch.float32}
    assert all(map(torch.equal, before, after))
