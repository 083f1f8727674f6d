"""Makes a tiny configuration of a model type's class.

Config classes use a handful of names for the same things, and `COMMON` has a value for each. A value only makes a
default smaller, and if the default has layers of several kinds, all kinds are kept, in turn. `EXCEPTIONS` has what this
cannot do. Decides only sizes; knows nothing of weights.
"""

import dataclasses
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

CLASSES = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
"""The class of each model type that writes text: of text alone where there is one."""

CLASSES_WITH: dict[str, dict[str, str]] = {
    "images": dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    "sounds": {
        model_type: name
        for model_type, name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items()
        if model_type in FEATURE_EXTRACTOR_MAPPING_NAMES or "omni" in model_type
    },
    "videos": {
        model_type: name
        for model_type, name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items()
        if model_type in VIDEO_PROCESSOR_MAPPING_NAMES
    },
}
"""The class of each model type that reads images, sounds or videos, and writes text."""

VOCAB_SIZE = 256
NUM_LAYERS = 4
WINDOW = 12
MAX_POSITIONS = 256
HIDDEN_SIZE = 64
NUM_HEADS = 4
HEAD_DIM = 16

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "depth")
_ENCODER_LAYERS = ("encoder_layers", "num_encoder_layers")
_WIDTHS = (
    *("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "input_embedding_size", "lru_width"),
    *("out_hidden_size", "text_hidden_size", "audio_hidden_size", "vision_hidden_size", "projector_hidden_size"),
    *("projection_dim", "image_token_embed_dim", "embed_dim", "encoder_hidden_size", "upsample_groups"),
)
_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "swa_num_attention_heads"),
    *("decoder_attention_heads", "encoder_attention_heads", "num_encoder_attention_heads"),
    "num_decoder_attention_heads",
)
_KEY_VALUE_HEADS = ("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads")
_HEAD_DIMS = (
    *("head_dim", "global_head_dim", "swa_head_dim", "kv_channels", "v_head_dim", "dim_head", "linear_head_dim"),
    *("qk_nope_head_dim", "attention_head_size", "linear_key_head_dim", "linear_value_head_dim"),
    *("mamba_head_dim", "index_head_dim", "d_head"),
)
_INNER_SIZES = (
    *("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "dff", "dim_ff"),
    *("feed_forward_size", "intermediate_size_mlp", "dense_intermediate_size", "d_inner", "mlp_dim"),
)
_EXPERT_SIZES = (
    *("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size", "prefix_dense_intermediate_size"),
)
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_POSITIONS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length", "model_max_length"),
    *("max_target_positions", "max_source_positions"),
)
_WINDOWS = (
    *("sliding_window", "attention_window_size", "window_size", "local_attention", "sliding_window_size"),
    *("attention_chunk_size", "keep_window_size", "local_attention_window_len"),
)
_VOCABULARIES = (
    *("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size", "decoder_vocab_size", "audio_vocab_size"),
)

_LATENT_ATTENTION = {"qk_rope_head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2}
_INDEXERS = {"index_topk": 16, "index_n_heads": 16, "index_block_size": 4, "index_topk_blocks": 4}  # fewer heads: ties
_EXPERT_GROUPS = {"n_group": 2, "num_expert_group": 2, "topk_group": 1, "zero_expert_num": 2}
_LAYER_PLANS = {"first_k_dense_replace": 1, "num_dense_layers": 1, "max_window_layers": 2, "num_kv_shared_layers": 2}
_OF_SOUND_ENCODERS = {"num_timestamp_prediction_layers": 1, "num_filters": 4, "depths": 2}
_NO_EXTRA_LAYERS = {"num_mtp_layers": 0, "num_nextn_predict_layers": 0}
_LINEAR_ATTENTION = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_num_heads": 4, "conv_L_cache": 3}
_STATES = {"state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "n_groups": 2, "mamba_d_ssm": 2 * HIDDEN_SIZE}
_STATE_HEADS = {"mamba_num_heads": 8, "mamba_n_heads": 8, "n_mamba_heads": 2}
_CHUNKS = {"chunk_size": 8, "mamba_chunk_size": 8, "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8}
_RANKS = {"laurel_rank": 8, "adapter_rank": 8, "gated_norm_rank": 8, "hc_lowrank": 8, "d_rel": 8, "rel_extent": 64}
_SMALL_SIZES = {"hidden_size_per_layer_input": 8, "router_hidden_size": 16, "block_multiple_of": 16, "rotary_dim": 8}
_PROJECTIONS = {"word_embed_proj_dim": HIDDEN_SIZE, "prompt_mid_dim": 32}
_OTHER_SENSES = {"image_size": 32, "patch_size": 8, "mm_tokens_per_image": 4, "audio_chunk_size": 800}

COMMON: dict[str, int] = {
    **dict.fromkeys(_LAYERS, NUM_LAYERS),
    **dict.fromkeys(_ENCODER_LAYERS, NUM_LAYERS),  # some caches count these
    **dict.fromkeys(_WIDTHS, HIDDEN_SIZE),
    **dict.fromkeys(_HEADS, NUM_HEADS),
    **dict.fromkeys(_KEY_VALUE_HEADS, 2),
    **dict.fromkeys(_HEAD_DIMS, HEAD_DIM),
    **dict.fromkeys(_INNER_SIZES, 96),
    **dict.fromkeys(_EXPERT_SIZES, 32),
    **dict.fromkeys(_NUM_EXPERTS, 4),
    **dict.fromkeys(_EXPERTS_PER_TOKEN, 2),
    **dict.fromkeys(_POSITIONS, MAX_POSITIONS),
    **dict.fromkeys(_WINDOWS, WINDOW),
    **dict.fromkeys(_VOCABULARIES, VOCAB_SIZE),
    **_LATENT_ATTENTION,
    **_INDEXERS,
    **_EXPERT_GROUPS,
    **_LAYER_PLANS,
    **_OF_SOUND_ENCODERS,
    **_NO_EXTRA_LAYERS,
    **_LINEAR_ATTENTION,
    **_STATES,
    **_STATE_HEADS,
    **_CHUNKS,
    **_RANKS,
    **_SMALL_SIZES,
    **_PROJECTIONS,
    **_OTHER_SENSES,
    "num_codebooks": 1,
}
"""A value for each name, including sizes that only one config class has."""

_NONE_STAYS = frozenset({*_WINDOWS, *_NUM_EXPERTS, *_EXPERTS_PER_TOKEN, *_EXPERT_SIZES, "n_group"}) | {
    *("topk_group", "lru_width", "q_lora_rank", "num_kv_heads", "unpadded_vocab_size", "max_window_layers"),
    *("embedding_size", "rotary_dim", "num_mtp_layers"),
}
"""Names whose value None means that there is no such thing, or that it follows from others."""

_TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "blank_token_id": 3}

_NO_STEP_TOO_SMALL = {"time_step_min": 1e-20}
"""The smallest time step in transformers' prefill of these classes; its decoding has no such limit."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}
"""Parts of half a head for time, height and width."""
NUM_CODES = 64
_SMALL_CODEBOOK = {"base_channels": 32, "num_embeddings": NUM_CODES, "latent_channels": 32}
_FIFTEEN_FRAMES = {"window_size": 15}
_AS_MANY_KEYS = {"num_key_value_heads": NUM_HEADS}
_TWO_KINDS = {"layer_types": ["linear_attention", "full_attention"] * 2}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": {"attention_type": "original_full"},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "blt_global_transformer": {"hidden_size": 2 * HIDDEN_SIZE},
    "blt_local_decoder": {"hidden_size_global": 2 * HIDDEN_SIZE},
    "blt_local_encoder": {"hidden_size_global": 2 * HIDDEN_SIZE},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "chameleon_vqgan": _SMALL_CODEBOOK,
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE)},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2_sam_vision_model": {"image_size": 48, "patch_size": 1, "downsample_channels": [64, HIDDEN_SIZE]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "doge": {"keep_window_size": 2048},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_audio_encoder": {"adapter_input_size": HIDDEN_SIZE, "adapter_out_dim": HIDDEN_SIZE},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": HIDDEN_SIZE, "adapter_out_dim": HIDDEN_SIZE},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "emu3_vqgan": {"base_channels": 32, "hidden_size": 128, "codebook_size": NUM_CODES},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    "fast_vlm": {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "fastvit_mci3",
            "hidden_size": 128,
            "model_args": {"inference_mode": True, "layers": (1,) * 5, "embed_dims": (16, 16, 32, 32, 64)},
        }
    },
    "fun_asr_nano": {"adaptor_config": {"hidden_size": HIDDEN_SIZE, "intermediate_size": HIDDEN_SIZE // 4}},
    "gemma3n_vision": {
        "hidden_size": 2048,
        "model_args": {"channel_multiplier": 1 / 16, "msfa_output_resolution": 2},
    },
    "gemma4_text": {"num_kv_shared_layers": 2},
    **dict.fromkeys(("glm4v_text", "glm_ocr_text"), _SECTIONS),
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite4_vision": {
        "downsample_rate": "2/4",
        "deepstack_layer_map": [[-2, 0]],
        "spatial_target_layers": [1],
    },
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), _FIFTEEN_FRAMES),
    "granitemoehybrid": _TWO_KINDS,
    "hunyuan_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2, 2]}},
    "inkling_vision": {"num_hidden_layers": 5},  # it needs SciPy if a patch's size has more factors
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "janus_vqgan": _SMALL_CODEBOOK,
    "kyutai_speech_to_text": {"audio_pad_token_id": 3, "audio_bos_token_id": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_vision_model": {
        "intermediate_size": 4 * HIDDEN_SIZE,
        **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 48),
    },
    "mamba2": {"num_heads": 8},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 2], "vision_output_dim": 3 * HIDDEN_SIZE},
    "molmo2_adapter": {"vision_feature_layer": [2, 1]},
    "molmo2_vision": {"image_size": [32, 32]},
    "moshi": {"sliding_window": MAX_POSITIONS},  # not shorter than its context, as by default
    "muse_spark_audio": {"hidden_sizes": (16, 16, 32, 64)},
    **dict.fromkeys(("nemotron3_5_transcribe_asr_audio", "nemotron3_diarization_audio"), _AS_MANY_KEYS),
    "nemotron_h": _NO_STEP_TOO_SMALL,
    "paddleocr_vl_text": _SECTIONS,
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), _SECTIONS),
    "qwen4_exp_text": {
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
        "eos_token_id": 2,
    },
    "radio": {"video_temporal_patch_size": 2},
    "reformer": {"axial_pos_shape": (16, 16), "axial_pos_embds_dim": (16, 48), "num_buckets": 4, "hash_seed": 0},
    "step3p5": {"sliding_window": WINDOW},
    "timm_wrapper": {
        "architecture": "vit_pe_core_tiny_patch16_384",
        "model_args": {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4},
    },
    "unlimited_ocr_sam_vision_model": {
        "patch_size": 4,
        "downsample_channels": [HIDDEN_SIZE, HIDDEN_SIZE],
        "global_attn_indexes": [1, 3],
    },
    "vibevoice_acoustic_tokenizer_encoder": {"vae_std": 0.0},  # it would add noise to its output
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xlstm": {"hidden_size": 2 * HIDDEN_SIZE},  # sizes are rounded up to multiples of 64 in one place, not in another
    "xmod": {"default_language": "en_XX"},
    "zamba2": _NO_STEP_TOO_SMALL,
}
"""Further values that a class needs, by the model type of the class or of a part."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a tiny configuration that `model_class` takes. Passes on errors of the config class."""
    config = whole_config(model_type)
    wanted = model_class(model_type).config_class
    if not isinstance(config, wanted):  # the language model within a larger model
        return next((part for part in _parts(config).values() if isinstance(part, wanted)), config)
    return config


def whole_config(model_type: str) -> PreTrainedConfig:
    """Return a tiny configuration of a model type, or of a part of one."""
    return _tiny(CONFIG_MAPPING[model_type], EXCEPTIONS.get(model_type, {}))


def model_class(model_type: str) -> type[PreTrainedModel]:
    """Return the class of a model type that writes text."""
    is_causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto_class = AutoModelForCausalLM if is_causal else AutoModelForMultimodalLM
    found: type[PreTrainedModel] = auto_class._model_mapping[CONFIG_MAPPING[model_type]]
    return found


def _tiny(config_class: type[PreTrainedConfig], exceptions: dict[str, Any]) -> PreTrainedConfig:
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    aliases: dict[str, str] = config_class.attribute_map
    values: dict[str, Any] = {
        name: None if defaults[name] is None else token for name, token in _TOKEN_IDS.items() if name in defaults
    }
    for name, default in defaults.items():
        common = COMMON.get(name, next((COMMON.get(alias) for alias, to in aliases.items() if to == name), None))
        is_alias = aliases.get(name) in defaults
        if common is not None and not is_alias and (smaller := _smaller(name, default, common)) is not None:
            values[name] = smaller
    if "kv_lora_rank" in defaults:  # latent attention: heads share a latent vector, not keys and values
        values |= _latent_heads(defaults)
    if "is_decoder" in defaults:
        values["is_decoder"] = True
    example = _example(config_class)
    if example is not None:
        values |= _layer_kinds(example, defaults) | _rotary_sections(example)
        for name, part in _parts(example).items():
            values[name] = _tiny(type(part), EXCEPTIONS.get(part.model_type, {}))
    return config_class(**(values | exceptions))


def _smaller(name: str, default: Any, common: int) -> Any:
    if default is None:
        return None if name in _NONE_STAYS else common
    if isinstance(default, list | tuple):
        return type(default)([common] * len(default))
    if isinstance(default, int) and not isinstance(default, bool):
        return min(default, common)
    return common


def _latent_heads(defaults: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"num_key_value_heads": NUM_HEADS}
    sizes = [defaults.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "head_dim")]
    nope, rope, whole = (size if isinstance(size, int) else 0 for size in sizes)
    if whole:
        values["head_dim"] = COMMON["qk_rope_head_dim"] + (HEAD_DIM if whole == nope + rope else 0)
    return {name: value for name, value in values.items() if name in defaults}


def _rotary_sections(example: PreTrainedConfig) -> dict[str, Any]:
    """Return rotary parameters whose sections, of time, height and width, share half of a tiny head."""
    rope = getattr(example, "rope_parameters", None)
    sections = rope.get("mrope_section") if isinstance(rope, dict) else None
    if not sections or not isinstance(rope, dict):
        return {}
    half = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    smaller = [max(1, half * each // sum(sections)) for each in sections]
    return {"rope_parameters": {**rope, "mrope_section": [smaller[0] + half - sum(smaller), *smaller[1:]]}}


def _example(config_class: type[PreTrainedConfig]) -> PreTrainedConfig | None:
    """Return the default configuration, if there is one."""
    try:
        return config_class()
    except Exception:
        return None


def _parts(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """Return the configurations inside a configuration."""
    return {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}


def _layer_kinds(example: PreTrainedConfig, defaults: dict[str, Any]) -> dict[str, list[str]]:
    """Return the lists that name each layer's kind, with all kinds in turn."""
    kinds: dict[str, list[str]] = {}
    for name, value in vars(example).items():
        is_list = isinstance(value, list) and len(value) > NUM_LAYERS and all(isinstance(each, str) for each in value)
        if name in defaults and is_list and name not in ("architectures",):
            distinct = list(dict.fromkeys(value))
            kinds[name] = [distinct[layer % len(distinct)] for layer in range(NUM_LAYERS)]
    return kinds
