"""The embedded picture model: its drawings, its files, what it sees, and the command that shows it."""

import re
import sys
from random import Random

import pytest
import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from inflight import LLM, SamplingParams
from inflight.cli.demo_pictures import as_blocks
from inflight.picture_model import PICTURE_MODEL
from inflight.picture_model.drawing import PROMPT, SIDE, Scene, draw, scenes
from tests.command import Command, command
from tools.train_picture_model import messages

__all__ = ["command"]


def answers(exchanges: list[tuple[object, str]]) -> list[str]:
    """What the model answers, greedily, to texts about images, all at once."""
    outputs = LLM(PICTURE_MODEL).chat(
        [messages(image, text) for image, text in exchanges],
        SamplingParams(temperature=0, max_tokens=20),
        use_tqdm=False,
    )
    return [output.outputs[0].text for output in outputs]


# --- the drawings -----------------------------------------------------------------------------------------------------


def test_held_out_scenes_are_none_of_the_training() -> None:
    held_out, known = set(scenes(held_out=True)), set(scenes(held_out=False))
    assert not held_out & known
    assert len(held_out) == 220
    assert {thing for scene in held_out for thing in (scene.first, scene.second)} <= {scene.first for scene in known}


def test_a_scene_has_a_caption_and_questions() -> None:
    scene = Scene("red circle", "left of", "blue square")
    assert scene.caption == "a red circle left of a blue square"
    assert scene.questions == [
        ("What is left of the blue square?", "a red circle"),
        ("What is right of the red circle?", "a blue square"),
    ]
    assert (Scene("green star").caption, Scene("green star").questions) == ("a green star", [])


def test_the_larger_thing_lies_where_the_caption_says() -> None:
    for seed in range(20):
        image = draw(Scene("red square", "above", "blue square"), Random(seed))
        assert (image.mode, image.size) == ("RGB", (SIDE, SIDE))
        pixels = torch.tensor(list(image.tobytes()), dtype=torch.float).view(SIDE, SIDE, 3)
        red, _, blue = (pixels - pixels.mean(dim=2, keepdim=True)).unbind(2)
        rows = [(channel > 60).nonzero()[:, 0].float() for channel in (red, blue)]
        assert rows[0].mean() < rows[1].mean()
        assert len(rows[0]) > len(rows[1])


def test_the_same_seed_draws_the_same_picture() -> None:
    pictures = [draw(Scene("yellow star"), Random(seed)).tobytes() for seed in (1, 1, 2)]
    assert pictures[0] == pictures[1] != pictures[2]


# --- the files --------------------------------------------------------------------------------------------------------


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in PICTURE_MODEL.iterdir() if path.is_file()) <= 5_000_000


def test_weights_load_as_float32_without_missing_ones() -> None:
    model, told = LlavaForConditionalGeneration.from_pretrained(PICTURE_MODEL, dtype="auto", output_loading_info=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]


def test_the_processor_scales_a_picture_and_makes_room_for_it() -> None:
    processor = AutoProcessor.from_pretrained(PICTURE_MODEL)
    read = processor(text="<image>", images=[draw(Scene("red star"), Random(0))], return_tensors="pt")
    assert read["pixel_values"].shape == (1, 3, 48, 48)
    assert read["input_ids"].tolist() == [[processor.tokenizer.bos_token_id, *[processor.image_token_id] * 36]]


def test_no_file_names_a_path_of_the_machine_that_made_it() -> None:
    texts = [path.read_text("utf-8") for path in PICTURE_MODEL.iterdir() if path.suffix in {".json", ".md", ".jinja"}]
    assert not any(re.search(r"/(home|work|tmp|root)/", text) for text in texts)


# --- the model --------------------------------------------------------------------------------------------------------


def test_it_captions_scenes_that_it_never_saw() -> None:
    random = Random(2)
    drawn = random.sample(scenes(held_out=True), 60)
    captions = answers([(draw(scene, random), PROMPT) for scene in drawn])
    right = sum(caption == scene.caption for caption, scene in zip(captions, drawn, strict=True))
    assert right >= 0.95 * len(drawn)


def test_it_reads_the_question() -> None:
    random = Random(3)
    drawn = [(draw(scene, random), scene) for scene in random.sample(scenes(held_out=True), 30)]
    asked = [(image, *each) for image, scene in drawn for each in scene.questions]
    given = answers([(image, question) for image, question, _ in asked])
    assert sum(answer == right for answer, (*_, right) in zip(given, asked, strict=True)) >= 0.9 * len(asked)


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_picture_becomes_half_blocks() -> None:
    from PIL import Image

    image = Image.new("RGB", (2, 2), (255, 0, 0))
    image.paste((0, 0, 255), (0, 1, 2, 2))
    text = as_blocks(image, 2)
    assert text.plain == "▀▀\n"
    assert {str(span.style) for span in text.spans} == {"#ff0000 on #0000ff"}


def test_demo_shows_captions_without_a_terminal(command: Command) -> None:
    done = command("demo", "--pictures")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    captions = [line for line in lines if re.fullmatch(r"[✓✗] a [a-z ]+", line)]
    assert len(captions) == 12
    right = sum(line.startswith("✓") for line in captions)
    assert f"{right} of 12 captions are right" in lines[-1]
    assert f'inflight generate -m "{PICTURE_MODEL}" --image FILE' in lines[-1]


def test_demo_shows_pictures_in_colours(command: Command) -> None:
    done = command("demo", "--pictures", FORCE_COLOR="1", COLORTERM="truecolor", TERM="xterm-256color")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("▀") == 12 * 24 * 12
    assert "\x1b[38;2;" in done.stdout


def test_demo_says_that_pictures_need_pillow(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    done = command("demo", "--pictures")
    assert done.returncode != 0
    assert "images need Pillow (pip install pillow)" in done.stderr


@pytest.mark.parametrize("option", ["--web", "--slow"])
def test_pictures_have_neither_a_page_nor_slow_steps(command: Command, option: str) -> None:
    done = command("demo", "--pictures", option)
    assert done.returncode == 2
    assert "--pictures cannot be given with" in done.stderr
