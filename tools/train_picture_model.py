"""Trains the embedded model for pictures, writes it into the package, and judges the written files.

    python tools/train_picture_model.py                    # everything; figures go to REPORT.md next to the weights
    python tools/train_picture_model.py --evaluate-only    # judge the shipped files again

This module decides what the model is: a Llava with about a million parameters, which captions drawings of one or two
shapes (`inflight.picture_model.drawing`) and answers questions about them. Nothing is downloaded. Each drawing is used
once, and a tenth of the scenes is held out. Weights are stored in bfloat16 and computed in float32.
"""

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on a shared machine, spinning threads cost more than they save

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from inflight import LLM, SamplingParams
from inflight.picture_model import PICTURE_MODEL
from inflight.picture_model.drawing import PROMPT, SIDE, Place, Scene, draw, paint, place, scenes
from tools.train_demo_model import END, train_tokenizer, write_report

IMAGE = "<image>"
READ_SIDE = SIDE // 2
PATCH = 8
LENGTH = 53
"""Tokens of the longest row, and of all others with padding."""
IGNORED = -100
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    seed: int = 7
    seeing_steps: int = 1200
    steps: int = 2000
    batch: int = 32
    singles: float = 0.15
    """The share of pictures that show one thing."""
    questions: float = 0.4
    """The share of the other pictures that are asked about."""
    learning_rate: float = 1.5e-3
    warmup: int = 100
    weight_decay: float = 0.05

    def shortened(self, factor: float) -> "Recipe":
        """The same settings with a fraction of the steps, to try out the pipeline."""
        return replace(self, seeing_steps=int(self.seeing_steps * factor), steps=int(self.steps * factor))

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step: a linear warm-up, then half a cosine down to a fiftieth."""
        progress = max(0, step - self.warmup) / max(1, steps - self.warmup)
        return self.learning_rate * min(1, (step + 1) / self.warmup) * (0.51 + 0.49 * math.cos(math.pi * progress))


def build_processor() -> LlavaProcessor:
    """The tokenizer knows each word of a caption, and all bytes. Pictures are scaled to one size, and never cropped."""
    captions = [scene.caption for scene in scenes(held_out=False)]
    questions = [question for scene in scenes(held_out=False) for question, _ in scene.questions]
    tokenizer = train_tokenizer([*captions, *questions, *[PROMPT] * 100], 384)
    tokenizer.add_tokens([IMAGE], special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    size = {"height": READ_SIDE, "width": READ_SIDE}
    half = [0.5, 0.5, 0.5]
    images = CLIPImageProcessorPil(size=size, do_center_crop=False, image_mean=half, image_std=half)
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
    )


def build_model(processor: LlavaProcessor) -> LlavaForConditionalGeneration:
    tokenizer = processor.tokenizer
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=READ_SIDE,
        patch_size=PATCH,
        projection_dim=128,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=128**-0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        image_seq_length=(READ_SIDE // PATCH) ** 2,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


def messages(image: Any, text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}]


class Studio:
    """Draws batches of the training's scenes."""

    def __init__(self, recipe: Recipe, processor: LlavaProcessor) -> None:
        self.recipe, self.processor, self.random = recipe, processor, Random(recipe.seed)
        known = scenes(held_out=False)
        self.pairs = [scene for scene in known if scene.relation]
        self.singles = [scene for scene in known if not scene.relation]
        self.things = [scene.first for scene in self.singles]
        self.row = cache(self._row)

    def drawings(self) -> tuple[list[Scene], list[list[Place]], torch.Tensor]:
        """A batch of scenes, the places of their things, and pixels `[batch, 3, READ_SIDE, READ_SIDE]` float32."""
        drawn = [self._choose() for _ in range(self.recipe.batch)]
        places = [place(scene, self.random) for scene in drawn]
        images = [paint(scene, where, self.random) for scene, where in zip(drawn, places, strict=True)]
        return drawn, places, self.processor.image_processor(images, return_tensors="pt")["pixel_values"]

    def patches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch of pixels, and what is at each patch's centre, `[batch, patches]` int64: 0 is the ground, others are
        numbers of things."""
        drawn, places, pixels = self.drawings()
        centres = [(index + 0.5) * PATCH * SIDE / READ_SIDE for index in range(READ_SIDE // PATCH)]
        labels = torch.zeros(len(drawn), len(centres) ** 2, dtype=torch.int64)
        for scene, where, row in zip(drawn, places, labels, strict=True):
            for thing, (x, y, radius) in zip((scene.first, scene.second), where, strict=False):
                for index, (down, right) in enumerate(product(centres, centres)):
                    if math.hypot(right - x, down - y) < radius:
                        row[index] = 1 + self.things.index(thing)
        return pixels, labels

    def exchanges(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A batch of pixels, of token ids `[batch, LENGTH - 1]` int64, and of the ids to predict after them, in the
        same shape (`IGNORED` outside of answers)."""
        drawn, _, pixels = self.drawings()
        ids, labels = torch.tensor([self.row(*self._ask(scene)) for scene in drawn]).unbind(1)
        return pixels, ids, labels

    def _choose(self) -> Scene:
        return self.random.choice(self.singles if self.random.random() < self.recipe.singles else self.pairs)

    def _ask(self, scene: Scene) -> tuple[str, str]:
        is_asked = scene.questions and self.random.random() < self.recipe.questions
        return self.random.choice(scene.questions) if is_asked else (PROMPT, scene.caption)

    def _row(self, text: str, answer: str) -> tuple[list[int], list[int]]:
        tokenizer, blank = self.processor.tokenizer, torch.zeros(3, READ_SIDE, READ_SIDE, dtype=torch.uint8)
        chat = self.processor.apply_chat_template(messages(None, text), tokenize=False, add_generation_prompt=True)
        prompt = self.processor(text=chat, images=[blank], add_special_tokens=False)["input_ids"][0]
        ids = tokenizer(answer + END, add_special_tokens=False)["input_ids"]
        padding = LENGTH - len(prompt) - len(ids)
        labels = [*[IGNORED] * len(prompt), *ids, *[IGNORED] * padding]
        return [*prompt, *ids, *[tokenizer.pad_token_id] * padding][:-1], labels[1:]


def fit(recipe: Recipe, steps: int, modules: list[torch.nn.Module], loss_of: Callable[[], torch.Tensor]) -> None:
    """Lower the loss of `steps` batches."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    start = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step, steps)
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5}  loss {loss.item():.4f}  {time.perf_counter() - start:6.0f} s", flush=True)


def train(recipe: Recipe, model: LlavaForConditionalGeneration, processor: LlavaProcessor) -> None:
    """First the vision tower learns to name the thing at each patch, through a layer that is then dropped; captions
    alone teach it shapes slowly. Then the whole model learns captions and answers."""
    studio, vision = Studio(recipe, processor), model.model.vision_tower
    head = torch.nn.Linear(model.config.vision_config.hidden_size, 1 + len(studio.things))

    def loss_of_patches() -> torch.Tensor:
        pixels, labels = studio.patches()
        features = vision(pixels).last_hidden_state[:, 1:]
        return functional.cross_entropy(head(features).flatten(0, 1), labels.flatten())

    def loss_of_answers() -> torch.Tensor:
        pixels, ids, labels = studio.exchanges()
        logits = model(input_ids=ids, pixel_values=pixels, use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    fit(recipe, recipe.seeing_steps, [vision, head], loss_of_patches)
    fit(recipe, recipe.steps, [model], loss_of_answers)


def save(model: LlavaForConditionalGeneration, processor: LlavaProcessor, folder: Path) -> None:
    """Write weights in bfloat16 with a config that says float32."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype = model.config.text_config.dtype = model.config.vision_config.dtype = torch.float32
    model.generation_config = GenerationConfig(
        bos_token_id=processor.tokenizer.bos_token_id,
        eos_token_id=processor.tokenizer.convert_tokens_to_ids(["</s>", END]),
        pad_token_id=processor.tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    stored = {name: weight.to(torch.bfloat16) for name, weight in load_file(weights).items()}
    save_file(stored, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    processor.save_pretrained(folder)


def make_model(recipe: Recipe, folder: Path, hardware: str) -> list[str]:
    """Train and save the model; return a description in words."""
    torch.manual_seed(recipe.seed)
    start = time.perf_counter()
    processor = build_processor()
    model = build_model(processor)
    train(recipe, model, processor)
    save(model, processor, folder)
    return [
        f"{recipe.seeing_steps} steps of naming what each patch shows, then {recipe.steps} of captions and answers",
        f"{recipe.batch} drawings a step, each used once (seed {recipe.seed})",
        f"{len(scenes(held_out=False)):,} scenes, drawn with random sizes, places, tints and noise",
        f"on {hardware}, threads: {torch.get_num_threads()}; Python {platform.python_version()}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}, tokenizers {tokenizers.__version__}",
        f"{math.ceil(time.perf_counter() - start)} s",
    ]


@dataclass(frozen=True)
class Score:
    """How many answers are exactly right."""

    right: int
    count: int

    def __str__(self) -> str:
        return f"{self.right} of {self.count} ({self.right / self.count:.1%})"


def judge(folder: Path, count: int, seed: int) -> dict[str, Score]:
    """Answer about `count` drawings of held-out scenes and `count` of others, through inflight, greedily."""
    llm, random, scores = LLM(folder), Random(seed), {}
    for title, held_out in (("held-out scenes", True), ("training scenes, redrawn", False)):
        drawn = [random.choice(scenes(held_out)) for _ in range(count)]
        images = [draw(scene, random) for scene in drawn]
        captions = [(image, PROMPT, scene.caption) for image, scene in zip(images, drawn, strict=True)]
        questions = [(image, *each) for image, scene in zip(images, drawn, strict=True) for each in scene.questions]
        for kind, asked in (("captions", captions), ("answers to questions", questions)):
            chats = [messages(image, text) for image, text, _ in asked]
            outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
            pairs = zip(outputs, asked, strict=True)
            scores[f"{kind}, {title}"] = Score(sum(out.outputs[0].text == each[2] for out, each in pairs), len(asked))
    return scores


def describe_files(folder: Path) -> list[str]:
    files = sorted(path for path in folder.iterdir() if path.suffix in {".json", ".jinja", ".safetensors"})
    parameters = sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())
    sizes = [f"`{path.name}`: {path.stat().st_size:,} bytes" for path in files]
    total = sum(path.stat().st_size for path in files)
    return [f"{parameters:,} parameters", *sizes, f"together: {total:,} bytes (limit 5 MB)"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the embedded picture model and judge it.")
    parser.add_argument("--evaluate-only", action="store_true", help="only judge the existing files")
    parser.add_argument("--output", type=Path, default=PICTURE_MODEL, help="the model's folder")
    parser.add_argument("--shorten", type=float, default=1.0, help="run only this fraction of the training steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--drawings", type=int, default=1000, help="of each kind, for judging it")
    parser.add_argument("--hardware", default="a CPU", help="a description of the machine for the report")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sections: dict[str, list[str]] = {}
    if not options.evaluate_only:
        sections["Training"] = make_model(Recipe().shortened(options.shorten), options.output, options.hardware)
    scores = judge(options.output, options.drawings, seed=1)
    sections["Exactly right, through `LLM`, greedily"] = [f"{title}: {score}" for title, score in scores.items()]
    sections["Size"] = describe_files(options.output)
    if not options.evaluate_only:
        write_report(options.output, "The embedded picture model", Path(__file__).name, sections)
    for title, lines in sections.items():
        print(title, *lines, sep="\n  ")
    held_out = next(iter(scores.values()))
    return 0 if held_out.right >= 0.95 * held_out.count else 1


if __name__ == "__main__":
    sys.exit(main())
