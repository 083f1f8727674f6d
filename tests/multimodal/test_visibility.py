"""Images whose tokens see each other (Gemma 3): exact, and whole in a step."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inflight import LLM, InvalidRequestError, SamplingParams
from inflight.contracts.step.multimodal import MultimodalInputs
from tests.multimodal.models import image, plain_answer, with_processor

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS: list[tuple[str, list[int]]] = [
    ("The quick", []),
    ("What is <boi> fox", [0]),
    ("<boi> and <boi>?", [1, 2]),
    ("What is <boi> fox and what else", [0]),
    ("a<boi><boi>c<boi>", [2, 0, 3]),
]
IMAGE_TOKENS = 16


def prompts() -> list[dict[str, Any]]:
    return [{"prompt": text, "images": [image(each) for each in numbers]} for text, numbers in PROMPTS]


def made(**options: Any) -> LLM:
    model, processor = with_processor("gemma3")
    return LLM(copy.deepcopy(model), processor, block_size=4, **options)


def answers(llm: LLM, given: list[dict[str, Any]]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(given, GREEDY, use_tqdm=False)]


def test_answers_are_those_of_the_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = with_processor("gemma3")
    expected = []
    for text, numbers in PROMPTS:
        images = [image(each) for each in numbers] or None
        read = processor(text=text, images=images, return_tensors="pt")
        expected.append(plain_answer(copy.deepcopy(model), read, 12))
    llm = made(max_num_batched_tokens=24, max_num_seqs=6, num_blocks=40)
    assert answers(llm, prompts()) == expected
    assert llm.stats().num_preemptions > 0
    assert answers(llm, prompts()) == expected, "from the cache"
    assert [answers(llm, [each])[0] for each in prompts()] == expected, "alone"
    monkeypatch.setattr(torch.ops.inflight, "see_items", lambda call: None)
    assert answers(made(), prompts()) != expected, "it matters what an image's tokens see"


@pytest.mark.parametrize("options", [{"speculation": {"max_draft_tokens": 4}}, {"quantization": "int8"}], ids=str)
def test_they_go_together_with(options: dict[str, Any]) -> None:
    llm = made(max_num_batched_tokens=30, max_num_seqs=6, num_blocks=200, **options)
    together = answers(llm, prompts())
    assert together == [answers(llm, [each])[0] for each in prompts()]


def test_an_image_that_fits_no_step_is_refused() -> None:
    few = made(max_num_batched_tokens=20, max_num_seqs=6, num_blocks=100)
    with pytest.raises(
        InvalidRequestError, match=r"an image has 16 tokens that see each other; a step has room for 15"
    ):
        answers(few, prompts()[1:2])


def test_without_kernels_or_a_window_that_is_wide_enough_images_run_in_generate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    narrow = made(num_blocks=100)
    expected = answers(narrow, prompts()[1:3])
    outputs = narrow.engine.runner.encoder_outputs
    assert outputs is not None
    assert {each.why_generated for each in outputs.proofs.found.values()} == {None}
    monkeypatch.setattr(outputs.proofs, "window", 12)
    assert answers(narrow, prompts()[1:3]) == expected
    reference = made(attention_backend="reference", num_blocks=100)
    assert answers(reference, prompts()[1:3]) == expected
    outputs = reference.engine.runner.encoder_outputs
    assert outputs is not None
    assert str(outputs.proofs.found["image"].why_generated).endswith(
        "see each other, which needs the attention kernels"
    )


@given(st.data())
def test_steps_end_outside_of_ranges_and_go_on(data: st.DataObject) -> None:
    borders = sorted(data.draw(st.sets(st.integers(0, 60), min_size=2, max_size=6)))
    whole = list(zip(borders[::2], borders[1::2], strict=False))
    inputs = MultimodalInputs((), whole=whole)
    budget = max(end - start for start, end in whole)
    place = 0
    while place < 70:
        wanted = place + data.draw(st.integers(0, budget))
        end = inputs.end_of_step(place, wanted, place + budget)
        assert place <= end <= place + budget
        assert not any(first < end < last for first, last in whole) or end == place
        assert end > place or wanted == place
        place = max(end, place + (wanted == place))
