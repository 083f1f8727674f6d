"""When images are encoded: in the step that needs them, as many as it may, and each once."""

import copy
import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight import LLM, SamplingParams
from inflight.contracts.step.multimodal import EncoderInput, MultimodalInputs
from inflight.contracts.step.plan import StepPlan
from inflight.engine.step_feedback import ENCODING_SECONDS, PrefillLimit
from inflight.execution import encoder_outputs
from tests.multimodal.models import image, with_processor

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Steps:
    """An LLM, and how many images each of its steps has encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model_type: str, **options: Any) -> None:
        model, processor = with_processor(model_type)
        self.llm = LLM(copy.deepcopy(model), processor, block_size=4, num_blocks=200, max_num_seqs=8, **options)
        self.mark = "<boi>" if model_type == "gemma3" else "<image>"
        self.encoded: list[int] = []
        self.plans: list[StepPlan] = []
        run = self.llm.engine.runner.run

        def observed(plan: StepPlan, masks: Any) -> Any:
            given = run(plan, masks)
            images = self.llm.engine.runner.encoder_outputs
            assert images is not None
            if plan.spans:
                self.encoded.append(images.num_encoded)
                self.plans.append(plan)
            return given

        monkeypatch.setattr(self.llm.engine.runner, "run", observed)

    def answers(self, *prompts: tuple[str, list[int]]) -> list[list[int]]:
        self.encoded.clear()
        self.plans.clear()
        read = [
            {"prompt": text.replace("<image>", self.mark), "images": [image(each) for each in numbers]}
            for text, numbers in prompts
        ]
        return [list(each.outputs[0].token_ids) for each in self.llm.generate(read, GREEDY, use_tqdm=False)]


PROMPTS = [("The quick", []), ("<image> and <image>?", [1, 2]), ("a<image><image>c<image>", [2, 0, 3]), ("A dog", [])]


@pytest.mark.parametrize("model_type", ["llava", "idefics3", "gemma3"])
def test_a_step_encodes_as_many_images_as_it_may_and_texts_do_not_wait(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Steps(monkeypatch, model_type).answers(*PROMPTS)
    steps = Steps(monkeypatch, model_type)
    monkeypatch.setattr(steps.llm.engine.scheduler, "limit_items", lambda: 1)
    assert steps.answers(*PROMPTS) == expected
    of_check = 1  # the first image of all shows what the model's tokens see
    assert sum(steps.encoded) == len({1, 2, 0, 3}) - of_check
    at_once = 2 if model_type == "gemma3" else 1  # neighbours whose tokens see each other, if they are one range
    assert max(steps.encoded) <= at_once
    for number in (0, 3):
        runs = [any(span.sequence_id == number for span in plan.spans) for plan in steps.plans]
        assert runs[0], "a text starts in the first step"
        assert runs == sorted(runs, reverse=True), "and has tokens in every one until it ends"


def test_images_of_cached_blocks_are_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, "llava")
    prompt = ("<image> What is it, and why is it so?", [0])
    first = steps.answers(prompt)
    monkeypatch.setattr(encoder_outputs, "MAX_BYTES", 0)
    steps.answers(("<image>", [1]))
    assert sum(steps.encoded) == 1
    assert steps.answers(prompt) == first
    assert sum(steps.encoded) == 0, "its blocks were cached"
    assert steps.answers(("<image> What?", [1]), ("<image> Why?", [2])) == [
        steps.answers(("<image> What?", [1]))[0],
        steps.answers(("<image> Why?", [2]))[0],
    ]


def test_an_image_that_cannot_be_encoded_ends_its_own_sequence_only(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [("The quick", []), ("<image>?", [1]), ("<image>!", [2])]
    expected = Steps(monkeypatch, "llava").answers(*prompts)
    steps = Steps(monkeypatch, "llava")
    steps.answers(("<image>", [0]))
    model = steps.llm.engine.runner.executor.model.base_model
    encode, seen = model.get_image_features, []

    def failing(pixel_values: Any, **options: Any) -> Any:
        seen.append(pixel_values)
        if len(seen) == 1:
            raise RuntimeError("no such tile\nin a kernel")
        return encode(pixel_values=pixel_values, **options)

    failing.__signature__ = inspect.signature(encode)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "get_image_features", failing)
    found = steps.llm.generate(
        [{"prompt": text, "images": [image(each) for each in numbers]} for text, numbers in prompts],
        GREEDY,
        use_tqdm=False,
    )
    assert [each.outputs[0].finish_reason for each in found] == ["length", "error", "length"]
    assert "the model cannot encode the images: no such tile" in str(found[1].error)
    assert list(found[0].outputs[0].token_ids) == expected[0]
    assert list(found[2].outputs[0].token_ids) == expected[2]


def test_the_number_of_images_follows_from_their_time() -> None:
    limit = PrefillLimit()
    assert limit.num_items() == 1, "unknown yet"
    limit.observe_items(4, ENCODING_SECONDS)
    assert limit.num_items() == 4
    for _ in range(50):
        limit.observe_items(1, 20 * ENCODING_SECONDS)
    assert limit.num_items() == 1


@given(st.data())
def test_spans_have_at_most_so_many_images_and_go_on(data: st.DataObject) -> None:
    borders = sorted(data.draw(st.sets(st.integers(0, 60), min_size=2, max_size=8)))
    pairs = list(zip(borders[::2], borders[1::2], strict=False))
    items = [EncoderInput("image", bytes([start]), range(start, end), {}) for start, end in pairs]
    inputs = MultimodalInputs(items, whole=pairs if data.draw(st.booleans()) else ())
    most, place = data.draw(st.integers(1, 3)), 0
    while place < 70:
        before = inputs.end_of_step(place, place + 70, place + 70, 0)
        assert before == place or not inputs.items_between(place, before)
        end = inputs.end_of_step(place, place + data.draw(st.integers(1, 70)), place + 70, most)
        assert place < end
        assert len(inputs.items_between(place, end)) <= most
        place = end
