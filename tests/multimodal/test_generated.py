"""Prompts with images that run in the model's own `generate`: the same answers beside anything, and with every option
that they go together with."""

import copy
import gc
import inspect
import signal
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel, ProcessorMixin

from inflight import LLM, InvalidRequestError, SamplingParams
from inflight.contracts.api.structured_output import StructuredOutput
from inflight.contracts.step.multimodal import EncoderInput, MultimodalInputs
from inflight.contracts.step.plan import SlotAssignment, Span, StepPlan
from inflight.engine.engine import Engine
from inflight.entrypoints.inputs import read_prompt
from inflight.execution.hf.model_call import CACHE_NAMES
from inflight.execution.kernels import kernels_available
from inflight.execution.multimodal.generated import GeneratedSequences
from inflight.execution.multimodal.proof import Proof
from inflight.execution.multimodal.turns import InTurns
from inflight.execution.ragged_batch import RaggedBatch
from tests.adapters.made import save_with_peft
from tests.multimodal import test_positions
from tests.multimodal.models import plain_answer, tiny, with_processor
from tests.multimodal.test_images import GREEDY, PROMPTS, SMALL, answers, plain, prompt_of

LLAVA = with_processor("llava")
GIVEN = [prompt_of(*each) for each in PROMPTS]
TEXT, ONE, _, _, _, THREE = GIVEN
needs_kernels = pytest.mark.skipif(not kernels_available(), reason="needs a C++ compiler")


@pytest.fixture
def unplaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model's rows may be placed."""
    monkeypatch.setattr(Proof, "allows", lambda *_: False)


generates = pytest.mark.usefixtures("unplaced")


def made(pair: tuple[PreTrainedModel, ProcessorMixin] = LLAVA, **options: Any) -> LLM:
    return LLM(copy.deepcopy(pair[0]), pair[1], **{"block_size": 4, "num_blocks": 200, **options})


def outputs(llm: LLM, prompts: Sequence[Any], **options: Any) -> list[Any]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **options})
    return [each.outputs for each in llm.generate(prompts, params, use_tqdm=False)]


@cache
def expected() -> list[list[int]]:
    return plain(LLAVA)


def num_cached(llm: LLM, prompt: Any) -> int:
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    return output.metrics.num_cached_tokens


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "inflight-turns"}


def patched(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Put a function in place of a method, which it gets first, with the same signature."""
    method = getattr(owner, name)

    def replaced(*args: Any, **options: Any) -> Any:
        return function(method, *args, **options)

    replaced.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    monkeypatch.setattr(owner, name, replaced)


@generates
@pytest.mark.parametrize(
    ("model_type", "executor", "num_blocks"),
    [("llava", "auto", 24), ("gemma3", "auto", 34), ("llava", "rows", 24), ("llava", "sequential", 24)],
)
def test_answers_are_those_of_the_plain_model(model_type: str, executor: str, num_blocks: int) -> None:
    """In chunks, beside texts and each other, with too few blocks for all."""
    pair, mark = with_processor(model_type), "<boi>" if model_type == "gemma3" else "<image>"
    prompts = [(text.replace("<image>", mark), numbers) for text, numbers in PROMPTS]
    expected, given = plain(pair, prompts), [prompt_of(*each) for each in prompts]
    assert len({tuple(each) for each in expected}) > 4, "images and texts matter"
    llm = made(pair, executor=executor, **SMALL | {"num_blocks": num_blocks})
    assert answers(llm, given) == expected
    assert llm.stats().num_preemptions > 0
    assert answers(llm, given) == expected, "again"
    assert [answers(llm, [each])[0] for each in given] == expected, "alone"


@generates
@pytest.mark.parametrize("executor", ["auto", "sequential"])
def test_nothing_is_left_after_the_last_answer(executor: str) -> None:
    before, llm = threads(), made(executor=executor)
    answers(llm, [ONE])
    assert not threads() - before


@generates
def test_company_does_not_change_a_bit() -> None:
    llm = made(**SMALL)
    together = outputs(llm, GIVEN, logprobs=2)
    assert together == [outputs(llm, [each], logprobs=2)[0] for each in GIVEN]
    assert together[0] == outputs(made(), [TEXT], logprobs=2)[0]


@generates
def test_a_seed_draws_the_same_tokens_in_any_company() -> None:
    options: dict[str, Any] = {"n": 2, "temperature": 1.5, "seed": 3, "max_tokens": 12}
    (alone,) = outputs(made(), [ONE], **options)
    assert alone[0].token_ids != alone[1].token_ids
    llm = made(num_blocks=24, max_num_seqs=6)
    assert outputs(llm, [THREE, ONE, TEXT], **options)[1] == alone
    assert llm.stats().num_preemptions > 0


def test_only_images_that_change_each_other_are_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    unchanged = expected()

    def coupled(encode: Any, self: Any, pixel_values: Any, *args: Any, **options: Any) -> Any:
        found = encode(self, pixel_values, *args, **options)
        found.pooler_output = [each * len(pixel_values) for each in found.pooler_output]
        return found

    patched(monkeypatch, type(LLAVA[0].base_model), "get_image_features", coupled)
    llm, coupled_answers = made(**SMALL), plain(LLAVA)
    assert coupled_answers != unchanged
    assert answers(llm, GIVEN) == coupled_answers
    images = llm.engine.runner.encoder_outputs
    assert images is not None
    assert images.proofs.found["image"].why_generated is None
    assert "several images of a prompt other values than each alone" in (
        images.proofs.found["images"].why_generated or ""
    )
    assert [num_cached(llm, prompt) > 8 for prompt in GIVEN] == [len(numbers) == 1 for _, numbers in PROMPTS]
    assert answers(llm, GIVEN) == coupled_answers


@generates
def test_the_models_own_way_to_generate_is_not_asked() -> None:
    model = copy.deepcopy(LLAVA[0])
    model.generation_config.update(eos_token_id=expected()[1][3], repetition_penalty=2.0, max_length=30)
    assert answers(made((model, LLAVA[1])), GIVEN[:2]) == expected()[:2]


@generates
def test_blocks_that_stay_empty_are_used_by_no_other() -> None:
    text, llm = "The quick brown fox jumps over", made()
    prompts = [(text + "<image>", [0]), (text + "<image>", [2])]
    expected = plain(LLAVA, [*prompts, (text, [])])
    assert expected[0] != expected[1]
    given = [prompt_of(*each) for each in prompts]
    for _ in range(2):
        assert answers(llm, given) == expected[:2]
    assert [num_cached(llm, each) for each in [*given, text]] == [0, 0, 0]
    assert answers(llm, [text, given[0]]) == [expected[2], expected[0]]


@generates
def test_an_error_in_generate_ends_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    before, llm = threads(), made()
    (output,) = llm.generate([THREE], GREEDY, use_tqdm=False)
    length = len(output.prompt_token_ids or ()) + 3  # which no other prompt reaches

    def failing(forward: Any, *args: Any, **options: Any) -> Any:
        cache = next((options[name] for name in CACHE_NAMES if options.get(name) is not None), None)
        if cache is not None and cache.get_seq_length() == length:
            raise RuntimeError("no such page\nin a kernel")
        return forward(*args, **options)

    patched(monkeypatch, llm.engine.runner.model, "forward", failing)
    found = llm.generate(GIVEN, GREEDY, use_tqdm=False)
    assert [each.outputs[0].finish_reason for each in found] == ["length"] * 5 + ["error"]
    assert str(found[-1].error).endswith("fails: no such page")
    assert [list(each.outputs[0].token_ids) for each in found] == [*expected()[:5], expected()[5][:4]]
    assert not threads() - before


@generates
def test_a_generate_that_ends_by_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made()
    patched(
        monkeypatch,
        llm.engine.runner.model,
        "generate",
        lambda generate, **options: generate(**options | {"max_new_tokens": 3}),
    )
    found = llm.generate([ONE, TEXT], GREEDY, use_tqdm=False)
    assert str(found[0].error) == "the model's generate fails: it ends by itself"
    assert [list(each.outputs[0].token_ids) for each in found] == [expected()[1][:3], expected()[0]]


def submit(engine: Engine, name: str, prompt: Any, llm: LLM) -> None:
    read = read_prompt(prompt, llm.tokenizer)
    engine.submit(engine.inputs.accept(name, read.token_ids, GREEDY, multimodal=read.multimodal))


@generates
def test_an_aborted_request_and_the_end_of_an_engine_leave_no_thread() -> None:
    before, llm = threads(), made()
    engine: Any = Engine(copy.deepcopy(LLAVA[0]), llm.engine.config, llm.tokenizer)
    submit(engine, "a", ONE, llm)
    submit(engine, "b", THREE, llm)
    for _ in range(4):
        engine.step()
    assert len(threads() - before) == 2
    engine.abort("a")
    engine.step()
    (other,) = threads() - before
    del engine
    gc.collect()
    other.join(60)
    assert not other.is_alive()


@generates
@pytest.mark.parametrize("executor", ["auto", "sequential"])
def test_the_positions_after_an_image_are_not_those_of_the_next_text(executor: str) -> None:
    """The model keeps the last prompt's offset between positions and tokens (M-RoPE)."""
    ids: dict[str, Any] = {"image_token_id": test_positions.PLACEHOLDER, "vision_start_token_id": test_positions.BEGIN}
    model = tiny("qwen2_vl", **ids, vision_end_token_id=test_positions.END, video_token_id=8)
    engine = LLM(copy.deepcopy(model), executor=executor, num_blocks=100, block_size=4).engine
    expected, found = [], [list[int]() for _ in range(6)]

    def step() -> None:
        for output in engine.step():
            found[int(output.request_id)] += output.new_token_ids

    for index, numbers in enumerate([[], [0], [1, 0], [], [0], []]):
        token_ids, places = test_positions.prompt(numbers, index)
        images = [test_positions.image(model, number) for number in numbers]
        types = {"mm_token_type_ids": torch.tensor([[int(each == test_positions.PLACEHOLDER) for each in token_ids]])}
        merged = {name: torch.cat([each[name] for each in images]) for name in (images[0] if images else ())}
        inputs = {"input_ids": torch.tensor([token_ids]), **types, **merged}
        expected.append(plain_answer(copy.deepcopy(model), inputs, 10))
        items = [
            EncoderInput("image", bytes([number]) * 32, own, test_positions.as_arrays(each))
            for number, own, each in zip(numbers, places, images, strict=True)
        ]
        arrays = test_positions.as_arrays(types), test_positions.as_arrays(merged)
        multimodal = MultimodalInputs(items, *arrays) if items else None
        engine.submit(engine.inputs.accept(str(index), token_ids, test_positions.GREEDY, multimodal=multimodal))
        step()
        step()
    while engine.has_unfinished_requests:
        step()
    assert found == expected


@generates
def test_texts_beside_are_drafted_and_these_are_not() -> None:
    llm = made(speculation={"max_draft_tokens": 4})
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prediction=each) for each in expected()]
    found = llm.generate(GIVEN, params, use_tqdm=False)
    assert [list(each.outputs[0].token_ids) for each in found] == expected()
    assert [each.metrics.num_draft_tokens > 0 for each in found] == [True, *[False] * 5]


@generates
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"quantization": "int8"}, marks=needs_kernels),
        {"dtype": "bfloat16"},
        {"attention_backend": "reference"},
        {"prefix_cache_dir": ...},
    ],
    ids=str,
)
def test_they_go_together_with(options: dict[str, Any], tmp_path: Path) -> None:
    if "prefix_cache_dir" in options:
        LLAVA[0].save_pretrained(tmp_path / "model")
        LLAVA[1].save_pretrained(tmp_path / "model")
        own: dict[str, Any] = {"prefix_cache_dir": str(tmp_path / "prefixes"), "dtype": "float32", "num_blocks": 100}
        llm = LLM(tmp_path / "model", block_size=4, **own)
    else:
        llm = made(**options)
    together = answers(llm, GIVEN)
    assert together == [answers(llm, [each])[0] for each in GIVEN]
    if not options.keys() & {"quantization", "dtype"}:
        assert together == expected()


@generates
def test_their_output_has_a_form_and_an_end() -> None:
    llm = made()
    wishes = StructuredOutput(regex="(yes|no), [a-f]{4}")
    (form,), (text,) = outputs(llm, [ONE, TEXT], structured_output=wishes, ignore_eos=False, max_tokens=40)
    assert {form.finish_reason, text.finish_reason} == {"stop"}
    assert form.text[-6:-4] == text.text[-6:-4] == ", "
    ((whole,),) = outputs(llm, [ONE], max_tokens=12)
    stop = whole.text[4:6]
    ((cut,),) = outputs(llm, [ONE], max_tokens=12, stop=stop)
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(stop)], "stop")


@generates
def test_what_they_cannot_have_is_refused(tmp_path: Path) -> None:
    adapted = save_with_peft(LLAVA[0], tmp_path, 1, target_modules=r".*language_model.*(q_proj|v_proj)", r=4)
    llm = made(adapters={"a": str(tmp_path)})
    for name, params, adapter in (
        ("prompt_logprobs", SamplingParams(prompt_logprobs=1), None),
        ("an adapter", GREEDY, "a"),
    ):
        with pytest.raises(InvalidRequestError, match=f"own generate runs this prompt, without {name}"):
            llm.generate([ONE], params, use_tqdm=False, adapter=adapter)
    found = llm.generate(GIVEN[:2], GREEDY, use_tqdm=False, adapter=["a", None])
    own = plain((cast(PreTrainedModel, adapted), LLAVA[1]), PROMPTS[:1])
    assert own != expected()[:1]
    assert [list(each.outputs[0].token_ids) for each in found] == own + expected()[1:2], "beside an adapter's text"


def test_a_computation_takes_turns() -> None:
    before = threads()
    seen: list[str] = []

    def compute(end: Callable[[], Any]) -> Any:
        try:
            assert turns.is_here
            seen.append("begins")
            turns.pause()
            seen.append("goes on")
            return end()
        finally:
            seen.append("ends")

    turns = InTurns(lambda: compute(lambda: 42))
    assert not turns.is_here
    assert (seen, turns.has_ended) == ([], False)
    assert (turns.resume(), seen, turns.has_ended) == (None, ["begins"], False)
    assert (turns.resume(), seen, turns.has_ended) == (42, ["begins", "goes on", "ends"], True)
    turns.abandon()  # there is nothing to end
    turns = InTurns(lambda: compute(lambda: [].pop()))
    turns.resume()
    with pytest.raises(IndexError, match="pop from empty list"):
        turns.resume()
    assert turns.has_ended
    seen.clear()
    for num_turns, expected in ((0, []), (1, ["begins", "ends"])):
        turns = InTurns(lambda: compute(lambda: 42))
        for _ in range(num_turns):
            turns.resume()
        turns.abandon()
        assert (turns.has_ended, seen) == (True, expected)
    assert not threads() - before


def test_an_interrupt_ends_a_computation() -> None:
    begun, ends = list[int](), list[int]()

    def compute() -> None:
        try:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            begun.append(0)
            turns.pause()
        finally:
            ends.append(0)

    turns = InTurns(compute)
    with pytest.raises(KeyboardInterrupt):
        turns.resume()
    assert (turns.has_ended, begun, ends) == (True, [0], [0])


def test_a_step_of_generated_sequences_alone_copies_blocks() -> None:
    """Of a text that forked, and waits."""
    sequences = GeneratedSequences(LLAVA[0], None, takes_all=True)
    assigned = SlotAssignment(0, 7, 0, [5, 6, 7], 3, GREEDY)
    plan = StepPlan((Span(7, 0, 0, [5, 6], 0, 3),), (([0],),), copies=((1, 2),), assignments=(assigned,))
    sequences.take(plan)
    seen: list[StepPlan] = []

    def others(batch: RaggedBatch) -> torch.Tensor:
        seen.append(batch.plan)
        return torch.empty(0, 400)

    logits = sequences.forward(RaggedBatch.from_plan(plan, 4, torch.device("cpu")), others, 4)
    assert logits.shape == (0, 400)
    assert [(each.spans, each.copies) for each in seen] == [((), ((1, 2),))]
