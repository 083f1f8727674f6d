"""Random sounds, and real processors of sounds with a tokenizer of bytes."""

import io
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import soundfile
import transformers
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from inflight.census.sensitive import sensitive_model
from inflight.census.tiny_configs import model_class, tiny_config
from inflight.text.processor import Processor
from tests.text.tokenizers_for_tests import byte_level

RATE = 16_000
AUDIO_TOKEN = "<audio>"
CHAT = (
    "{% for m in messages %}<s>{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'audio' %}<audio>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}</s>{% endfor %}"
)
NAMED = {"audio_token": AUDIO_TOKEN, "boa_token": "<boa>", "eoa_token": "<eoa>", "image_token": "<image>"}
MORE = {"boi_token": "<boi>", "eoi_token": "<eoi>"}
OWN = {"Gemma3n": "Gemma3nAudio", "MossTranscribeDiarize": "MossTranscribeDiarize"}
"""The beginnings of names of classes with a feature extractor of their own; all others have Whisper's."""


@cache
def sound_processor(name: str) -> ProcessorMixin:
    """A processor of a class: "Qwen2Audio", "GlmAsr", "AudioFlamingo3", "Gemma3n" or "MossTranscribeDiarize"."""
    inner = byte_level().inner.backend_tokenizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, extra_special_tokens=NAMED | MORE, pad_token="</s>")
    extractor = getattr(transformers, f"{OWN.get(name, 'Whisper')}FeatureExtractor")()
    given: dict[str, Any] = {"feature_extractor": extractor, "tokenizer": tokenizer, "chat_template": CHAT}
    if name == "Gemma3n":
        given |= {"image_processor": SiglipImageProcessorPil(), "audio_seq_length": 5}
    else:
        given["audio_token"] = AUDIO_TOKEN
    processor: ProcessorMixin = getattr(transformers, f"{name}Processor")(**given)
    return processor


def config(processor: ProcessorMixin) -> Any:
    """What of a model's configuration names the placeholder."""
    return SimpleNamespace(audio_token_id=processor.tokenizer.convert_tokens_to_ids(AUDIO_TOKEN))


@cache
def with_sounds() -> tuple[PreTrainedModel, ProcessorMixin]:
    """A tiny GLM-ASR, and its processor."""
    processor, tiny = sound_processor("GlmAsr"), tiny_config("glmasr")
    tiny.audio_token_id = config(processor).audio_token_id
    tiny.text_config.vocab_size = len(processor.tokenizer)
    tiny.audio_config.num_mel_bins = processor.feature_extractor.feature_size
    tiny.audio_config.max_position_embeddings = 1500
    return sensitive_model(model_class("glmasr"), tiny)[0], processor


def reader(name: str) -> Processor:
    """Our processor around one of `sound_processor`."""
    processor = sound_processor(name)
    return Processor(processor, config(processor))


def sound(number: int, seconds: float = 0.0) -> NDArray[np.float32]:
    """A random sound; sounds of different numbers differ in length, too."""
    length = int((seconds or (0.5, 1.3, 2.0)[number % 3]) * RATE)
    return (np.random.default_rng(number).normal(size=length) / 10).astype(np.float32)


def file_of(samples: NDArray[np.float32], kind: str = "wav", rate: int = RATE, **options: Any) -> bytes:
    """A sound as a file's bytes."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind.upper(), **options)
    return file.getvalue()
