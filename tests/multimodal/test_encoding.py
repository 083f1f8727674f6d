"""When images are encoded: once, between steps, in slices of time, and without cost for others."""

import copy
import inspect
import threading
import time
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inflight import LLM, SamplingParams
from inflight.contracts.step.plan import StepPlan
from inflight.engine import step_feedback
from inflight.engine.step_feedback import PrefillLimit
from inflight.entrypoints.inputs import read_prompt
from inflight.execution.multimodal import encoder_outputs, item_proofs, slices
from inflight.execution.multimodal.slices import Sliced
from tests.multimodal.models import image, with_processor

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [("The quick", []), ("<image> and <image>?", [1, 2]), ("a<image><image>c<image>", [2, 0, 3]), ("A dog", [])]


class Engine:
    """An LLM whose steps and encoded images are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model_type: str, **options: Any) -> None:
        model, processor = with_processor(model_type)
        self.llm = LLM(copy.deepcopy(model), processor, block_size=4, num_blocks=200, max_num_seqs=8, **options)
        self.mark = "<boi>" if model_type == "gemma3" else "<image>"
        self.encoded: list[bytes] = []
        self.plans: list[StepPlan] = []
        self.num_calls = 0
        runner = self.llm.engine.runner
        images = runner.encoder_outputs
        assert images is not None
        self.images = images
        run, encode, keep = runner.run, runner.encode, encoder_outputs.encode

        def running(plan: StepPlan, masks: Any) -> Any:
            self.plans += [plan] if plan.spans else []
            return run(plan, masks)

        def encoding(*args: Any) -> None:
            self.num_calls += 1
            encode(*args)

        def keeping(model: Any, item: Any) -> Any:
            is_again = self.encoded[-1:] == [item.digest]  # the first is, with prepacked layers
            self.encoded += [item.digest] if item.digest and not is_again else []  # not several together, for the proof
            return keep(model, item)

        monkeypatch.setattr(runner, "run", running)
        monkeypatch.setattr(runner, "encode", encoding)
        monkeypatch.setattr(encoder_outputs, "encode", keeping)
        monkeypatch.setattr(item_proofs, "encode", keeping)

    def outputs(self, *prompts: tuple[str, list[int]]) -> list[Any]:
        self.encoded.clear()
        read = [
            {"prompt": text.replace("<image>", self.mark), "images": [image(each) for each in numbers]}
            for text, numbers in prompts
        ]
        return self.llm.generate(read, GREEDY, use_tqdm=False)

    def answers(self, *prompts: tuple[str, list[int]]) -> list[list[int]]:
        return [list(each.outputs[0].token_ids) for each in self.outputs(*prompts)]


@pytest.mark.parametrize("model_type", ["llava", "idefics3", "gemma3"])
def test_texts_go_on_while_images_are_encoded_module_by_module(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Engine(monkeypatch, model_type).answers(*PROMPTS)
    engine = Engine(monkeypatch, model_type, speculation="off")
    monkeypatch.setattr(step_feedback, "BACKGROUND_SECONDS", 0.0)  # a module's call at a time
    monkeypatch.setattr(step_feedback, "ENCODING_STRETCH", 0.0)
    engine.llm.engine.feedback.prefill_limit = PrefillLimit()
    assert engine.answers(*PROMPTS) == expected
    assert len(engine.encoded) == len(set(engine.encoded)) == len({0, 1, 2, 3}), "each once"
    assert engine.num_calls > 20
    for number in (0, 3):
        runs = [index for index, plan in enumerate(engine.plans) if number in {each.sequence_id for each in plan.spans}]
        assert runs == list(range(runs[0], runs[-1] + 1)), "a text has tokens in every step, from its first on"
        assert runs[-1] < len(engine.plans) - 8, "and ends before the images are encoded"
    assert engine.images._begun is None


@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_outputs_without_room_are_encoded_when_they_are_needed(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Engine(monkeypatch, model_type).answers(*PROMPTS)
    monkeypatch.setattr(encoder_outputs, "MAX_BYTES", 0)
    engine = Engine(monkeypatch, model_type, max_num_batched_tokens=48)
    assert engine.answers(*PROMPTS) == expected
    assert engine.answers(*PROMPTS) == expected, "from the cache"


def test_images_of_cached_blocks_are_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, "llava")
    prompt = ("<image> What is it, and why is it so?", [0])
    first = engine.answers(prompt)
    monkeypatch.setattr(encoder_outputs, "MAX_BYTES", 0)
    engine.answers(("<image>", [1]))
    assert len(engine.encoded) == 1
    assert engine.answers(prompt) == first
    assert not engine.encoded


@pytest.mark.parametrize("in_slices", [False, True])
def test_an_image_that_cannot_be_encoded_ends_its_own_sequence_only(
    in_slices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [("The quick", []), ("<image>?", [1]), ("<image>!", [2])]
    expected = Engine(monkeypatch, "llava").answers(*prompts)
    engine = Engine(monkeypatch, "llava")
    engine.answers(("<image>", [0]))
    if in_slices:
        engine.llm.engine.feedback.prefill_limit = PrefillLimit()
    model: Any = engine.llm.engine.runner.model.base_model
    encode, seen = model.get_image_features, []

    def failing(pixel_values: Any, **options: Any) -> Any:
        seen.append(pixel_values)
        if len(seen) == 1:
            raise RuntimeError("no such tile\nin a kernel")
        return encode(pixel_values=pixel_values, **options)

    failing.__signature__ = inspect.signature(encode)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "get_image_features", failing)
    found = engine.outputs(*prompts)
    assert [each.outputs[0].finish_reason for each in found] == ["length", "error", "length"]
    assert str(found[1].error).startswith("the model's encoder fails: no such tile")
    assert [list(found[each].outputs[0].token_ids) for each in (0, 2)] == [expected[0], expected[2]]


def test_a_step_with_other_images_does_not_end_an_image_that_is_being_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, "llava", enable_prefix_caching=False)
    engine.answers(("<image>", [0]))
    read = read_prompt({"prompt": "<image>", "images": [image(1)]}, engine.llm.tokenizer)
    assert read.multimodal is not None
    (item,) = read.multimodal.items
    engine.images.encode({item.digest: (0, item)}, 0.0)
    inner = engine.llm.engine
    again = read_prompt({"prompt": "<image>?", "images": [image(0)]}, engine.llm.tokenizer)
    inner.submit(inner.inputs.accept("a", again.token_ids, GREEDY, multimodal=again.multimodal))
    inner.step()
    assert engine.plans[-1].num_tokens > 16
    assert engine.images._begun is not None
    assert engine.images._begun[0] == item.digest
    inner.abort("a")  # nothing is left to run


def test_an_aborted_request_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, "llava")
    engine.answers(("<image>", [0]))
    monkeypatch.setattr(step_feedback, "BACKGROUND_SECONDS", 0.0)
    inner = engine.llm.engine
    inner.feedback.prefill_limit = PrefillLimit()
    read = read_prompt({"prompt": "<image>?", "images": [image(1)]}, engine.llm.tokenizer)
    inner.submit(inner.inputs.accept("a", read.token_ids, GREEDY, multimodal=read.multimodal))
    for _ in range(5):
        inner.step()
    assert engine.images._begun is not None
    inner.abort("a")
    assert engine.images._begun is None
    assert "inflight-turns" not in {each.name for each in threading.enumerate()}


def test_a_sliced_computation_pauses_between_modules() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    given = torch.ones(1, 2)
    sliced = Sliced(lambda: layers(given), layers.named_children())
    results = [sliced.resume(time.monotonic()) for _ in range(5)]
    assert results[:4] == [None] * 4
    assert torch.equal(results[4], layers(given))
    failing = Sliced(lambda: layers(torch.ones(1, 3)), layers.named_children())
    assert failing.resume(time.monotonic()) is None
    with pytest.raises(RuntimeError, match="shapes"):
        failing.resume(time.monotonic() + 60)
    unused = Sliced(lambda: layers(given), layers.named_children())
    unused.abandon()
    half = Sliced(lambda: layers(given), layers.named_children())
    half.resume(time.monotonic())
    half.abandon()
    assert "inflight-turns" not in {each.name for each in threading.enumerate()}
    assert not any(layer._forward_pre_hooks for layer in layers)


def test_a_slice_ends_before_a_module_that_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ran = [0.0], list[int]()

    class Taking(torch.nn.Module):
        def __init__(self, seconds: int) -> None:
            super().__init__()
            self.seconds = seconds

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            now[0] += self.seconds
            ran.append(self.seconds)
            return x

    monkeypatch.setattr(slices, "time", SimpleNamespace(monotonic=lambda: now[0]))
    parts = [torch.nn.Sequential(OrderedDict(short=Taking(1), long=Taking(5))) for _ in range(3)]
    blocks = torch.nn.Sequential(*parts)
    named = [(name, each) for name, each in blocks.named_modules() if isinstance(each, Taking)]
    sliced = Sliced(lambda: blocks(torch.ones(1)), named)
    found = []
    while sliced.resume(now[0] + 4) is None:
        found.append(ran.copy())
        ran.clear()
    assert [*found, ran] == [[1, 5], [1], [5], [1], [5]]
