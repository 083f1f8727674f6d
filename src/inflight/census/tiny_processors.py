"""Makes a tiny model that reads images, sounds or videos, and its own processor, with tiny settings.

The classes of configurations and processors use a handful of names for the same things; what these cannot do is in the
tables. Needs Pillow; the processors of some classes torchvision.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING
from transformers.utils import is_torchvision_available

from inflight.census.sensitive import build
from inflight.census.tiny_configs import HIDDEN_SIZE, NUM_CODES, whole_config
from inflight.contracts.step.multimodal import KINDS
from inflight.text.processor import Processor, reading_texts

SIDE = 32
"""Of an encoder's image, where the configuration names none."""
MAX_LENGTH = 4096
NUM_SPARE = 8
"""Token ids that no text has."""

INSTEAD = {"shieldgemma2": "gemma3"}
"""Model types whose processor writes the prompts itself, and those whose processors they take."""
ALIKE = {
    "cosmos3_omni": "qwen3_vl",
    "fast_vlm": "llava",
    "glm_ocr": "glm4v",
    "glm4v_moe": "glm4v",
    "glmga": "glm46v",
    "nemotron_h_omni": "parakeet_encoder",
    "qwen2_5_omni_thinker": "qwen2_5_omni",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe",
    "qwen3_vl_moe": "qwen3_vl",
}
"""Model types without all processors of their own, and those whose they take."""

_WINDOWS = {"vision_config.window_size": 32, "vision_config.fullatt_block_indexes": [1, 3]}
_DEEP = {"vision_config.deepstack_visual_indexes": [0, 2]}
_TILES: dict[str, Any] = {"image_grid_pinpoints": [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]}
_LARGE = {"vision_config.image_size": 1024, "vision_config.patch_size": 16}
_OMNI = dict.fromkeys(("vision_start_token_id", "vision_end_token_id", "audio_start_token_id", "audio_end_token_id"), 1)
_HEARS = {"audio_config.output_dim": HIDDEN_SIZE}
_SEE_EACH_OTHER = {"text_config.use_bidirectional_attention": "vision", "text_config.sliding_window": 300}
_GEMMA_3 = {"mm_tokens_per_image": 16, "text_config.sliding_window": 20}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "aria": {
        "vision_config.image_size": 490,
        "vision_config.patch_size": 14,
        "projector_patch_to_query_dict": {1225: 4, 4900: 8},
        "max_value_projector_patch_to_query_dict": 8,
    },
    **dict.fromkeys(("cosmos3_omni", "qwen3_vl", "qwen3_vl_moe"), _DEEP),
    **dict.fromkeys(("exaone4_5", "hyperclovax_vision_v2", "qwen2_5_vl"), _WINDOWS),
    **dict.fromkeys(("gemma3", "shieldgemma2"), _GEMMA_3),
    "gemma4": {"vision_config": "gemma4_vision", "audio_config": "gemma4_audio", **_SEE_EACH_OTHER},
    "gemma4_unified": {
        "vision_config": "gemma4_unified_vision",
        "audio_config": "gemma4_unified_audio",
        **_SEE_EACH_OTHER,
    },
    **dict.fromkeys(("got_ocr2", "pp_chart2table"), _LARGE),
    "kimi_k25": {"projection_hidden_size": 64},
    "kosmos-2.5": {"latent_query_num": 16, "vision_config.patch_embed_hidden_size": 192},
    **dict.fromkeys(("granite4_vision", "llava_next", "llava_next_video", "llava_onevision"), _TILES),
    "granite_speech_plus": {
        "encoder_config.cat_hidden_layers": [1],
        "projector_config.encoder_hidden_size": 2 * HIDDEN_SIZE,
    },
    "gemma3n": {
        "vision_soft_tokens_per_image": 4,
        "vision_config.vocab_offset": 255,
        "audio_config.vocab_offset": 264,
    },
    "glmasr": {"audio_config.max_position_embeddings": 1500},
    "moss_transcribe_diarize": {"audio_config.max_source_positions": 1500, "audio_chunk_size": 480_000},
    "nemotron_h_omni": {
        "audio_config": "parakeet_encoder",
        "audio_config.projection_hidden_size": HIDDEN_SIZE,
        "audio_config.projection_bias": False,
    },
    "qwen2_audio": {"audio_config.max_source_positions": 1500},
    "qwen3_asr": _HEARS,
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {"out_hidden_size": 256},
    "qwen2_5_omni_thinker": _WINDOWS | _OMNI | _HEARS,
    "qwen3_omni_moe_thinker": _DEEP | _OMNI | _HEARS,
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "voxtral": {"audio_config.max_source_positions": 1500, "audio_config.intermediate_size": 4 * HIDDEN_SIZE},
}
"""Further values of a class's configuration, by path. A part's value may be a model type: a tiny one of that."""

TOKENS: dict[str, dict[str, Any]] = {
    "llama4": {"image_token_id": "<|patch|>"},
    "molmo2": {"image_token_id": "<im_patch>"},
    "ovis2": {
        "image_token_id": "<IMG_ATOM>",
        "visual_indicator_token_ids": ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"],
    },
    "pp_chart2table": {"image_token_id": "<image>"},
}
"""Values of a class's configuration that are the ids of these tokens."""

MARKS: dict[str, dict[str, str]] = {
    "cohere_compass": {"image_token": "<|IMAGE_PAD|>"},
    "emu3": {"eol_token": "<|extra_200|>"},
    "fuyu": {"speaker_token": "|SPEAKER|", "newline_token": "|NEWLINE|", "answer_token": "<0x04>"},
    "qwen2_audio": {"audio_token": "<|AUDIO|>"},
    "minimax_m3_vl": {"media_token": "]<]image[>["},
}
"""Tokens, by attribute of the tokenizer, that a processor expects by another name than ours."""

CODES = {"chameleon": "IMGIMG{}Z", "emu3": "<|visual token {:06}|>"}
"""Names of the tokens into which a model turns images."""

PLACEHOLDERS = {
    "hunyuan_vl": "<|image_start|><image><|image_end|>",
    "minimax_m3_vl": "]<]image[>[",
    "pp_chart2table": "<image>" * 256,
    "qianfan_ocr": "<image>",
    "step3p7": "<im_patch>",
}
"""What a class's chat template writes for an image, where it is not the processor's token."""

_LONGEST_64 = {"size": {"longest_edge": 64}}
IMAGE_PROCESSORS: dict[str, dict[str, Any]] = {
    "aria": {"max_image_size": 490},
    "cohere2_vision": {"patch_size": 2},
    "deepseek_ocr2": {"size": {"height": 48, "width": 48}, "tile_size": 48},
    "dots3_note": {"temporal_patch_size": 1},
    "emu3": {"min_pixels": 256, "max_pixels": 4096},
    "fast_vlm": {"size": {"shortest_edge": 128}, "crop_size": {"height": 128, "width": 128}},
    "gemma3n": {"size": {"height": 64, "width": 64}},
    "inkling2": {"size": {"height": 16, "width": 16}},
    "inkling_mm_model": {"size": {"height": 8, "width": 8}},
    "idefics2": {"do_image_splitting": False, "size": {"shortest_edge": 16, "longest_edge": 64}},
    "lfm2_vl": {
        "encoder_patch_size": 8,
        "tile_size": 32,
        "min_image_tokens": 1,
        "max_image_tokens": 8,
        "size": {"height": 32, "width": 32},
    },
    **dict.fromkeys(("lighton_ocr", "mistral3"), _LONGEST_64),  # the plain model fails for an image of one token
    "molmo2": {"overlap_margins": [1, 1]},
    "nemotron_h_omni": {"min_num_patches": 4, "max_num_patches": 64},
    "perception_lm": {"tile_size": 32, "max_num_tiles": 1},
    "step3p7": {
        "size": {"height": 32, "width": 32},
        "patch_size": 32,
        "vision_patch_size": 8,
        "downsampler_stride": 4,
    },
    "unlimited_ocr": {"tile_size": 32},
    "video_llava": {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "aria": {"size_conversion": {490: 4, 980: 8}},
    "aya_vision": {"img_size": 32, "patch_size": 8},
    "deepseek_ocr2": {"patch_size": 1},
    "fast_vlm": {"patch_size": 64, "num_additional_image_tokens": 0},
    "kosmos-2.5": {"num_image_tokens": 16},
    "llava_onevision": {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    "perception_lm": {"patch_size": 8, "pooling_ratio": 1},
    "unlimited_ocr": {"patch_size": 4},
}
"""Further arguments."""

_NUM_TOKENS = ("image_seq_length", "image_seq_len", "num_image_tokens")
"""Arguments of processors that say how many tokens an image, or a tile of it, has."""
_OF_THE_MODEL = (
    *("downsample_rate", "downsample_ratio", "pixel_shuffle_ratio", "img_size", "downsample_factor", "pooling_ratio"),
    *("patch_size", "spatial_merge_size", "vision_feature_select_strategy"),
)
"""Arguments of processors that the model's configuration has, too."""
_CHAT = (
    "{{% for m in messages %}}{{% for part in m.content %}}{{% if part.type == 'image' %}}{}{{% else %}}"
    "{{{{ part.text }}}}{{% endif %}}{{% endfor %}}{{% endfor %}}"
)


class TinyTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A tokenizer of bytes that has every special token a processor asks for."""

    def __getattr__(self, name: str) -> Any:
        attribute = name.removesuffix("_id")
        is_own = attribute.endswith("_token") and not attribute.startswith("_")
        if not is_own or attribute in (*self.SPECIAL_TOKENS_ATTRIBUTES, "extra_special_token"):
            return super().__getattr__(name)
        if name.endswith("_id"):
            return self.convert_tokens_to_ids(getattr(self, attribute))
        return self._with("<image>" if attribute == "image_token" else f"<|{attribute.removesuffix('_token')}|>")

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """See the base class."""
        for token in [tokens] if isinstance(tokens, str) else tokens:
            if len(token) > 3 and token[0] in "<[]":
                self._with(token)
        return super().convert_tokens_to_ids(tokens)

    def _with(self, mark: str) -> str:
        if mark not in self.get_vocab():
            self._tokenizer.add_special_tokens([mark])
        return mark


class WithSpace(TinyTokenizer):
    """One that begins a text with a space; Fuyu's processor drops its first token."""

    def _encode_plus(self, text: str, *args: Any, **options: Any) -> Any:
        return super()._encode_plus(" " + text, *args, **options)


def _tokenizer(model_type: str) -> TinyTokenizer:
    names = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, [], unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"pad_token": "<unk>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = (WithSpace if model_type == "fuyu" else TinyTokenizer)(tokenizer_object=inner, **special)
    for attribute, mark in MARKS.get(model_type, {}).items():
        tokenizer.__dict__[attribute] = tokenizer._with(mark)
    for number in range(NUM_CODES if model_type in CODES else 0):
        tokenizer._with(CODES[model_type].format(number))
    return tokenizer


def multimodal_class(model_type: str) -> type[PreTrainedModel]:
    """The class of a model type that reads images and writes text."""
    found: type[PreTrainedModel] = AutoModelForMultimodalLM._model_mapping[CONFIG_MAPPING[model_type]]
    return found


def tiny_with_processor(model_type: str, kind: str = "image") -> tuple[PreTrainedConfig, ProcessorMixin]:
    """A configuration of `multimodal_class`, and a processor for it. Passes on errors of these classes."""
    config = whole_config(model_type)
    for path, value in CONFIGURATIONS.get(model_type, {}).items():
        *parts, name = path.split(".")
        owner = config
        for part in parts:
            owner = getattr(owner, part)
        if name in ("vision_config", "audio_config"):
            value = whole_config(value)
        setattr(owner, name, value)
    processor = None if _processor_class(model_type) is None else _processor(model_type, config, 1)
    if processor is None or kind not in Processor(processor).kinds:
        raise ValueError(f"it has no processor of {KINDS[kind]}")
    _agree(model_type, config, processor)
    unknown = [name for name in _NUM_TOKENS if name not in PROCESSORS.get(model_type, {})]
    if kind != "audio" and any(hasattr(processor, name) for name in unknown):
        processor = _processor(model_type, config, _num_rows(model_type, config, processor))
        _agree(model_type, config, processor)
    return config, processor


def random_image(number: int) -> Image.Image:
    """A random image; those of different numbers differ in size, too."""
    width, height = ((40, 30), (31, 64), (90, 17))[number % 3]
    generator = torch.Generator().manual_seed(number)
    return Image.fromarray(torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator).numpy())


def random_sound(sampling_rate: int, number: int) -> NDArray[np.float32]:
    """A random sound, `[num_samples]`; those of different numbers differ in length, too."""
    length = int((0.5, 1.3, 2.0)[number % 3] * sampling_rate)
    return (np.random.default_rng(number).normal(size=length) / 10).astype(np.float32)


def random_video(number: int) -> NDArray[np.uint8]:
    """Random frames, `[num_frames, height, width, 3]`; those of different numbers differ in size, too."""
    num_frames, height, width = ((4, 32, 40), (6, 64, 32), (2, 32, 32))[number % 3]
    return np.random.default_rng(number).integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)


def _of(mapping: Any, model_type: str) -> Any:
    """The class that an Auto class has for a model type; None: it has none."""
    names = (INSTEAD.get(model_type, model_type), ALIKE.get(model_type))
    found = (mapping.get(CONFIG_MAPPING[each], None) for each in names if each)
    classes = next((each for each in found if each is not None), None)
    if not isinstance(classes, Mapping):
        return classes
    backends = ("torchvision", "pil") if is_torchvision_available() else ("pil",)
    return next((classes[each] for each in backends if classes.get(each)), None)


def _processor_class(model_type: str) -> type[ProcessorMixin] | None:
    """The class that `AutoProcessor` has for a model type; or else the one named like its configuration."""
    name = CONFIG_MAPPING[model_type].__name__.replace("Config", "Processor")
    found: type[ProcessorMixin] | None = _of(PROCESSOR_MAPPING, model_type) or getattr(transformers, name, None)
    return found


def _processor(model_type: str, config: PreTrainedConfig, num_tokens: int) -> ProcessorMixin:
    vision = getattr(config, "vision_config", None) or getattr(config, "vq_config", None) or config
    image_class, processor_class = _of(IMAGE_PROCESSOR_MAPPING, model_type), _processor_class(model_type)
    assert processor_class is not None
    sizes = {} if image_class is None else _sizes(image_class, config, vision) | IMAGE_PROCESSORS.get(model_type, {})
    images = image_class and image_class(**sizes)
    for name in _NUM_TOKENS:
        if hasattr(images, name):
            setattr(images, name, num_tokens)
    audio = getattr(config, "audio_config", None)
    parts = [audio, *(vars(audio).values() if audio else ())]
    of_sound = next(({"feature_size": each.num_mel_bins} for each in parts if hasattr(each, "num_mel_bins")), {})
    video, sound = (_of(mapping, model_type) for mapping in (VIDEO_PROCESSOR_MAPPING, FEATURE_EXTRACTOR_MAPPING))
    given = {
        "image_processor": images,
        "tokenizer": _tokenizer(model_type),
        "video_processor": video and video(**_sizes(video, config, vision)),
        "feature_extractor": sound and sound(**of_sound),
        "audio_processor": sound and sound(),
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
        **dict.fromkeys(_NUM_TOKENS, num_tokens),
        **{name: getattr(each, name) for each in (vision, config) for name in _OF_THE_MODEL if hasattr(each, name)},
    }
    parameters = inspect.signature(processor_class.__init__).parameters
    given |= {name: _tokenizer(model_type) for name in parameters if name.endswith("_tokenizer")}
    arguments = {name: value for name, value in given.items() if name in parameters and value is not None}
    processor: ProcessorMixin = reading_texts(processor_class(**(arguments | PROCESSORS.get(model_type, {}))))
    if model_type == "voxtral":  # which knows its token by number
        processor.audio_token = given["tokenizer"].audio_token
    if model_type in PLACEHOLDERS:
        processor.chat_template = _CHAT.format(PLACEHOLDERS[model_type])
    return processor


def _sizes(image_class: type, config: PreTrainedConfig, vision: PreTrainedConfig) -> dict[str, Any]:
    """Arguments of a processor of images or videos that fit a tiny encoder."""
    side, patch = (_first(getattr(vision, name, None)) for name in ("image_size", "patch_size"))
    side, patch = side or SIDE, patch or 8
    merge = getattr(vision, "spatial_merge_size", None) or getattr(config, "spatial_merge_size", None) or 2
    values: dict[str, Any] = {
        "min_pixels": (patch * merge) ** 2,
        "max_pixels": (2 * side) ** 2,
        "image_size": side,
        "merge_size": merge,
        "spatial_merge_size": merge,
        "temporal_patch_size": getattr(vision, "temporal_patch_size", None),
        "crop_to_patches": True,
        "do_image_splitting": True,
        "max_patches": 4,
        **_TILES,
    }
    sizes: dict[str, Any] = {}
    for name in dir(image_class):
        default = getattr(image_class, name)
        if name in ("size", "crop_size", "high_res_size") and default:
            counts_pixels = set(default) == {"shortest_edge", "longest_edge"} and default["longest_edge"] > 5000
            pixels = {"shortest_edge": values["min_pixels"], "longest_edge": values["max_pixels"]}
            sizes[name] = pixels if counts_pixels else dict.fromkeys(default, side)
        elif name == "max_image_size":
            sizes[name] = {"longest_edge": side} if isinstance(default, dict) else side
        elif name == "patch_size":
            sizes[name] = {"height": patch, "width": patch} if isinstance(default, dict) else patch
        elif values.get(name) is not None and default is not None:
            sizes[name] = values[name]
    return sizes


def _first(size: Any) -> int:
    return int((size[0] if isinstance(size, list | tuple) else size) or 0)


def _agree(model_type: str, config: PreTrainedConfig, processor: ProcessorMixin) -> None:
    """Give a configuration the token ids and the vocabulary of a processor."""
    own = Processor(processor)
    tokenizer: Any = processor.tokenizer
    ids = {kind: own.of(kind).token_id for kind in own.kinds}
    if "image" in ids:
        processor(text=f"a {own.of('image').placeholder} b", images=[random_image(0)], return_tensors="pt")
    for name, value in list(vars(config).items()):
        kind, _, rest = name.partition("_")
        is_place = kind in ids and rest in ("token_id", "token_index", "pad_token_id")
        if is_place and f"{kind}_token_id" not in TOKENS.get(model_type, {}):
            setattr(config, name, ids[kind])
        elif name.endswith("_token_id") and name[:4] not in ("pad_", "bos_", "eos_") and name[0] != "_" and value:
            attribute = name.removesuffix("_id")
            mark = getattr(processor, attribute, None) or getattr(tokenizer, attribute)
            setattr(config, name, tokenizer.convert_tokens_to_ids(mark))
    for name, marks in TOKENS.get(model_type, {}).items():
        setattr(config, name, tokenizer.convert_tokens_to_ids(marks))
    if "vocabulary_map" in vars(config):
        config.vocabulary_map = tokenizer.get_vocab()
    for part in (config, config.get_text_config(decoder=True)):
        names = ("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input")
        sizes = dict.fromkeys(names, len(tokenizer) + NUM_SPARE)
        for name, size in {**sizes, "max_position_embeddings": MAX_LENGTH}.items():
            if name in vars(part):
                setattr(part, name, size)


@torch.no_grad()
def _num_rows(model_type: str, config: PreTrainedConfig, processor: ProcessorMixin) -> int:
    """How many tokens a tile of an image has: the encoder's rows for each placeholder of a processor that writes one a
    tile."""
    own = Processor(processor, config).of("image")
    read = processor(text=own.placeholder, images=[random_image(0)], return_tensors="pt")
    encode = build(multimodal_class(model_type), config).base_model.get_image_features
    given = {name: value for name, value in read.items() if name in inspect.signature(encode).parameters}
    pooled = encode(**given, return_dict=True).pooler_output
    num_rows = sum(each.reshape(-1, each.shape[-1]).shape[0] for each in pooled)
    return int(num_rows // (read["input_ids"] == own.token_id).sum())
