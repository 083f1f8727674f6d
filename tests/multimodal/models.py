"""Tiny multimodal models with random, sensitive weights, and real processors with tiny settings."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from PIL import Image
from transformers import (
    Gemma3Processor,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from inflight.census.sensitive import sensitive_model
from inflight.census.tiny_configs import model_class, tiny_config
from tests.text.tokenizers_for_tests import byte_level

SIDE = 32
IMAGE_TOKEN = "<image>"
CHAT = (
    "{% for m in messages %}<s>{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}</s>{% endfor %}"
)


def tiny(model_type: str, change: Callable[[Any], None] = lambda _: None, **changes: Any) -> PreTrainedModel:
    """A model of a class, with changes of its configuration."""
    config = tiny_config(model_type)
    change(config)
    for name, value in changes.items():
        setattr(config, name, value)
    return sensitive_model(model_class(model_type), config)[0]


@cache
def with_processor(model_type: str) -> tuple[PreTrainedModel, ProcessorMixin]:
    """A model and its processor: "llava", "idefics3" (an image in tiles) or "gemma3" (whose images see each other)."""
    backend = byte_level().inner.backend_tokenizer
    backend.add_special_tokens(["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"])
    named = {"image_token": IMAGE_TOKEN, "boi_token": "<boi>", "eoi_token": "<eoi>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=named)
    token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    size = {"height": SIDE, "width": SIDE}
    if model_type == "llava":
        images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size)
        processor: ProcessorMixin = LlavaProcessor(
            images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
        )
    elif model_type == "idefics3":
        images = Idefics3ImageProcessorPil(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE})
        processor = Idefics3Processor(images, tokenizer, image_seq_len=4)
    else:
        processor = Gemma3Processor(Gemma3ImageProcessorPil(size=size), tokenizer, image_seq_length=16)
    processor.chat_template = CHAT if model_type != "gemma3" else CHAT.replace(IMAGE_TOKEN, "<boi>")
    config = tiny_config(model_type)
    config.text_config.vocab_size = len(tokenizer)
    for name in ("image_token_id", "image_token_index"):
        if hasattr(config, name):
            setattr(config, name, token_id)
    if model_type == "idefics3":
        config.scale_factor = 2
    if model_type == "gemma3":
        config.mm_tokens_per_image, config.text_config.sliding_window = 16, 20
    return sensitive_model(model_class(model_type), config)[0], processor


def image(number: int) -> Image.Image:
    """A random image; images of different numbers differ in size, too."""
    generator = torch.Generator().manual_seed(number)
    width, height = ((40, 30), (31, 64), (90, 17), (1, 1))[number % 4]
    pixels = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


@torch.no_grad()
def plain_answer(model: PreTrainedModel, inputs: dict[str, Any], num_tokens: int) -> list[int]:
    """What plain `transformers` generates for a processor's output."""
    length = inputs["input_ids"].shape[1]
    output = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    return list(output[0, length:].tolist())
