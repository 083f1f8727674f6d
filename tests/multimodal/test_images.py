"""Prompts with images give the tokens of plain `transformers`, whatever runs beside them and however they are cut."""

import asyncio
import base64
import copy
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image
from transformers import PreTrainedModel, ProcessorMixin

from inflight import LLM, AsyncLLM, InvalidRequestError, SamplingParams
from inflight.census.sensitive import build
from inflight.census.tiny_processors import multimodal_class, tiny_with_processor
from inflight.execution.kernels import kernels_available
from inflight.execution.multimodal import placing
from inflight.text.media import open_image
from inflight.text.processor import Processor
from tests.adapters.made import save_with_peft
from tests.multimodal.models import image, plain_answer, tiny, with_processor

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS: list[tuple[str, list[int]]] = [
    ("The quick", []),
    ("What is <image> fox", [0]),
    ("<image> and <image>?", [1, 2]),
    ("The <image> dog", [0]),
    ("What is <image> fox and what else", [0]),
    ("a<image>b<image>c<image>", [2, 0, 3]),
]
SMALL: dict[str, Any] = {"max_num_batched_tokens": 24, "block_size": 4, "max_num_seqs": 6}
"""Images have more tokens than a step, so chunks end in the middle of them."""


@pytest.fixture(scope="module", params=["llava", "idefics3"])
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, ProcessorMixin]:
    return with_processor(request.param)


def prompt_of(text: str, numbers: Sequence[int]) -> dict[str, Any]:
    return {"prompt": text, "images": [image(number) for number in numbers]}


def plain(
    pair: tuple[PreTrainedModel, ProcessorMixin], prompts: Sequence[tuple[str, list[int]]] = PROMPTS
) -> list[list[int]]:
    model, processor = copy.deepcopy(pair[0]), pair[1]
    read = [
        processor(text=text, images=[image(each) for each in numbers] or None, return_tensors="pt")
        for text, numbers in prompts
    ]
    return [plain_answer(model, each, 12) for each in read]


def answers(llm: LLM, prompts: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_answers_are_those_of_the_plain_model(pair: tuple[PreTrainedModel, ProcessorMixin]) -> None:
    expected = plain(pair)
    assert len({tuple(each) for each in expected}) > 4, "images and texts matter"
    num_blocks = {"llava": 24, "idefics3": 70}[pair[0].config.model_type]  # too few for all
    llm = LLM(copy.deepcopy(pair[0]), pair[1], num_blocks=num_blocks, **SMALL)
    assert llm.model_info.input_modalities == ("image",)
    prompts = [prompt_of(*each) for each in PROMPTS]
    assert answers(llm, prompts) == expected
    assert llm.stats().num_preemptions > 0
    assert answers(llm, prompts) == expected, "from the cache"
    assert [answers(llm, [each])[0] for each in prompts] == expected, "alone"


@pytest.mark.skipif(not kernels_available(), reason="graphs need a C++ compiler")
def test_steps_with_images_run_the_graph(
    pair: tuple[PreTrainedModel, ProcessorMixin], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(text, numbers) for text, numbers in PROMPTS]
    llm = LLM(copy.deepcopy(pair[0]), pair[1], block_size=4)
    answers(llm, prompts[:2])
    monkeypatch.setattr(llm.engine.runner.require_packed(), "_forward", None)
    assert answers(llm, prompts) == plain(pair)


def test_images_go_into_the_model_without_kernels(
    pair: tuple[PreTrainedModel, ProcessorMixin], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "kernels_available", lambda: False)
    llm = LLM(copy.deepcopy(pair[0]), pair[1], block_size=4)
    assert not llm.engine.runner.info.is_recorded
    assert answers(llm, [prompt_of(text, numbers) for text, numbers in PROMPTS]) == plain(pair)


def test_a_model_that_does_more_than_to_replace_embeddings_runs_in_its_own_generate() -> None:
    model, processor = with_processor("llava")
    model = copy.deepcopy(model)

    class More(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, pixel_values: Any = None, mm_encoder_outputs: Any = None, **kwargs: Any) -> Any:
            given = {"pixel_values": pixel_values, "mm_encoder_outputs": mm_encoder_outputs}
            outputs = super().forward(*args, **given, **kwargs)
            if mm_encoder_outputs is not None:
                outputs.logits = outputs.logits + 1
            return outputs

    model.__class__ = More
    llm = LLM(model, processor, block_size=4)
    assert answers(llm, [prompt_of(*each) for each in PROMPTS]) == plain(with_processor("llava"))
    reason = llm.engine.runner.encoder_outputs.proofs.found["image"].why_generated
    assert reason.startswith("More does more with images than")


def test_equal_images_share_blocks_and_others_do_not(pair: tuple[PreTrainedModel, ProcessorMixin]) -> None:
    llm = LLM(copy.deepcopy(pair[0]), pair[1], block_size=4, num_blocks=400)
    text = "<image> What is it"

    def cached(number: int, then: str = "") -> tuple[int, list[int]]:
        (output,) = llm.generate([prompt_of(text + then, [number])], GREEDY, use_tqdm=False)
        return output.metrics.num_cached_tokens, list(output.prompt_token_ids or ())

    first, token_ids = cached(0)
    again, _ = cached(0, " now, and why?")
    other, _ = cached(2)
    assert first == 0
    assert again >= len(token_ids) // 4 * 4 - 4
    assert other <= token_ids.index(pair[1].image_token_id), "no block with an image's placeholders is another image's"


@pytest.mark.parametrize("options", [{"speculation": {"max_draft_tokens": 4}}, {"quantization": "int8"}], ids=str)
def test_images_go_together_with(options: dict[str, Any]) -> None:
    model, processor = with_processor("llava")
    llm = LLM(copy.deepcopy(model), processor, **options, num_blocks=200)
    prompts = [prompt_of(*each) for each in PROMPTS]
    together = answers(llm, prompts)
    assert together == [answers(llm, [each])[0] for each in prompts]
    if "quantization" not in options:
        assert together == plain((model, processor))


def test_images_go_together_with_adapters_beside_other_requests(tmp_path: Path) -> None:
    model, processor = with_processor("llava")
    targets = r".*language_model.*(q_proj|v_proj|down_proj)"
    adapted = save_with_peft(model, tmp_path, 1, target_modules=targets, r=4)
    llm = LLM(copy.deepcopy(model), processor, adapters={"a": str(tmp_path)}, num_blocks=200)
    prompts, names = [prompt_of(*each) for each in PROMPTS], [None, "a", None, "a", "a", None]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, adapter=names)
    of_base, of_adapter = plain((model, processor)), plain((cast(PreTrainedModel, adapted), processor))
    expected = [of_base[i] if name is None else of_adapter[i] for i, name in enumerate(names)]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_a_chat_has_images_in_its_messages(pair: tuple[PreTrainedModel, ProcessorMixin]) -> None:
    model, processor = copy.deepcopy(pair[0]), pair[1]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "image", "image": image(1)}]},
        {"role": "assistant", "content": "A fox"},
    ]
    (output,) = LLM(model, processor, num_blocks=100).chat(messages, GREEDY, use_tqdm=False)
    text = "<s>What is <image></s><s>A fox</s>"
    read = processor(text=text, images=[image(1)], return_tensors="pt", add_special_tokens=False)
    assert list(output.outputs[0].token_ids) == plain_answer(copy.deepcopy(pair[0]), read, 12)


def test_an_engine_in_another_process_reads_images_of_a_folder(tmp_path: Path) -> None:
    model, processor = with_processor("llava")
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)

    async def ask() -> list[int]:
        async with AsyncLLM(tmp_path, dtype="float32", num_blocks=100) as llm:
            async for output in llm.generate(prompt_of(*PROMPTS[1]), GREEDY):
                if output.finished:
                    return list(output.outputs[0].token_ids)
        raise AssertionError

    expected = LLM(tmp_path, dtype="float32", num_blocks=100)
    assert asyncio.run(ask()) == answers(expected, [prompt_of(*PROMPTS[1])])[0]


def test_images_are_found_in_the_prefix_folder_after_a_restart(tmp_path: Path) -> None:
    model, processor = with_processor("llava")
    (tmp_path / "model").mkdir()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {
        "prefix_cache_dir": str(tmp_path / "prefixes"),
        "dtype": "float32",
        "block_size": 4,
        "num_blocks": 100,
    }
    found = []
    for number in (0, 0, 2):
        llm = LLM(tmp_path / "model", **options)
        (output,) = llm.generate([prompt_of("<image> What is it", [number])], GREEDY, use_tqdm=False)
        llm.engine.save_prefixes(60)
        found.append((output.metrics.num_cached_tokens, list(output.outputs[0].token_ids)))
    assert found[0][0] == found[2][0] == 0
    assert found[1][0] >= 16
    assert found[0][1] == found[1][1]


def test_every_form_of_an_image_is_the_same(tmp_path: Path) -> None:
    picture, file = image(0), io.BytesIO()
    picture.save(file, "PNG")
    (tmp_path / "picture.png").write_bytes(file.getvalue())
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    forms = [
        picture,
        file.getvalue(),
        url,
        tmp_path / "picture.png",
        str(tmp_path / "picture.png"),
        np.asarray(picture),
    ]
    assert len({open_image(form).tobytes() for form in forms}) == 1
    turned = Image.Exif()
    turned[0x0112] = 6
    rotated = io.BytesIO()
    picture.save(rotated, "JPEG", exif=turned)
    assert open_image(rotated.getvalue()).size == picture.size[::-1], "as the camera says"
    for mode in ("CMYK", "P", "LA", "1", "I;16"):
        other = io.BytesIO()
        picture.convert("L" if mode == "I;16" else mode).convert(mode).save(other, "TIFF")
        assert open_image(other.getvalue()).mode == "RGB"
    moving = io.BytesIO()
    picture.save(moving, "GIF", save_all=True, append_images=[image(0).rotate(90)])
    assert open_image(moving.getvalue()).size == picture.size


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([b"no image"], "an image cannot be read"),
        (["/absent.png"], "an image cannot be read"),
        (["data:image/png;base64,@@"], "an image cannot be read"),
        ([42], "an image cannot be read"),
        ([image(0), image(1)], "images"),
        ([Image.new("1", (30_000, 30_000))], "too large"),
    ],
    ids=["bytes", "path", "url", "number", "two", "large"],
)
def test_images_that_cannot_be_used_are_refused_in_one_sentence(images: list[Any], message: str) -> None:
    _, processor = with_processor("llava")
    with pytest.raises(InvalidRequestError, match=message) as caught:
        Processor(processor).read("What is <image>", images)
    assert "\n" not in str(caught.value)


def test_what_a_model_cannot_do_with_images_is_refused() -> None:
    model, processor = with_processor("llava")
    with pytest.raises(InvalidRequestError, match="has no processor of images"):
        LLM(copy.deepcopy(model), processor.tokenizer, num_blocks=100).generate(
            [prompt_of(*PROMPTS[1])], GREEDY, use_tqdm=False
        )
    rows = LLM(copy.deepcopy(model), processor, executor="rows", num_blocks=100)
    with pytest.raises(InvalidRequestError, match="generate runs this prompt, without prompt_logprobs"):
        rows.generate([prompt_of(*PROMPTS[1])], SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    text_only = LLM(tiny("qwen3"), processor, num_blocks=100)
    with pytest.raises(InvalidRequestError, match="has no encoder for them"):
        text_only.generate([prompt_of(*PROMPTS[1])], GREEDY, use_tqdm=False)


def test_more_images_than_the_limit_are_refused_before_they_are_read() -> None:
    model, processor = with_processor("llava")
    llm = LLM(copy.deepcopy(model), processor, num_blocks=100, limit_mm_per_prompt={"image": 2})
    assert len(answers(llm, [prompt_of(*PROMPTS[2])])[0]) == 12, "as many as the limit"
    refusal = r"the prompt has 3 images; at most 2 are accepted \(limit_mm_per_prompt\)"
    with pytest.raises(InvalidRequestError, match=refusal):
        llm.generate({"prompt": "<image>" * 3, "images": [b"not an image"] * 3}, GREEDY, use_tqdm=False)
    turns = [{"role": "user", "content": [{"type": "image", "image": b"not an image"}]} for _ in range(3)]
    with pytest.raises(InvalidRequestError, match=refusal):
        llm.chat(turns, GREEDY, use_tqdm=False)


def test_an_encoder_reads_pixels_in_the_dtype_of_its_weights() -> None:
    """Not every encoder converts them."""
    config, processor = tiny_with_processor("chameleon")
    model = build(multimodal_class("chameleon"), config).bfloat16()
    llm = LLM(model, processor, num_blocks=64)
    assert llm.model_info.dtype == "bfloat16"
    assert len(answers(llm, [prompt_of("What is <image>", [0])])[0]) == GREEDY.max_tokens
