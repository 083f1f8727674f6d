"""Tiny encoder-decoders that hear or see, with their processors, and Whisper's tokenizer of bytes."""

from functools import cache

import torch
from tokenizers import pre_tokenizers
from transformers import (
    MoonshineConfig,
    MoonshineForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    TrOCRConfig,
    TrOCRProcessor,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Processor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

LANGUAGES = ("en", "zh", "de")
MARKS = ("<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES))
MORE = ("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
SECONDS = 2
"""The longest sound that the model hears at once."""


def random_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = model_class(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.25 * torch.randn(parameter.shape)
    return model


@cache
def whisper() -> tuple[PreTrainedModel, ProcessorMixin]:
    """A tiny Whisper of three languages, sensitive to sounds, that never writes special tokens but languages."""
    letters = {name: number for number, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = WhisperTokenizer(vocab=letters, merges=[])
    tokenizer.add_special_tokens({"extra_special_tokens": [*MARKS, *MORE]})
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (*MARKS, *MORE)}
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 16}
    lengths = {"max_source_positions": 50 * SECONDS, "max_target_positions": 48, "vocab_size": len(tokenizer)}
    begin, end = ids["<|startoftranscript|>"], ids["<|endoftext|>"]
    special = {"decoder_start_token_id": begin, "bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    model = random_model(WhisperForConditionalGeneration, WhisperConfig(**sizes, **heads, **lengths, **special))
    config = model.generation_config
    config.suppress_tokens = sorted({*ids.values(), *range(40)} - {ids[f"<|{code}|>"] for code in LANGUAGES})
    config.begin_suppress_tokens, config.no_timestamps_token_id = [50], ids["<|notimestamps|>"]
    config.lang_to_id = {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES}
    config.task_to_id = {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]}
    config.is_multilingual, config.max_length = True, 48
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS)
    return model, WhisperProcessor(extractor, tokenizer)


@cache
def moonshine() -> tuple[PreTrainedModel, ProcessorMixin]:
    """A tiny Moonshine, which reads samples."""
    heads = {"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4}
    layers = {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2}
    special = {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 2}
    config = MoonshineConfig(vocab_size=300, hidden_size=32, intermediate_size=64, **heads, **layers, **special)
    model = random_model(MoonshineForConditionalGeneration, config)
    return model, Wav2Vec2Processor(Wav2Vec2FeatureExtractor(return_attention_mask=True), _bytes())


@cache
def trocr() -> tuple[PreTrainedModel, ProcessorMixin]:
    """A tiny TrOCR, which reads images; of two classes."""
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    sees = ViTConfig(hidden_size=32, image_size=32, patch_size=8, **heads)
    sizes = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
    writes = TrOCRConfig(vocab_size=300, d_model=32, cross_attention_hidden_size=32, **sizes)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(sees, writes)
    config.decoder_start_token_id, config.pad_token_id = 5, 1
    model = random_model(VisionEncoderDecoderModel, config)
    model.generation_config.decoder_start_token_id, model.generation_config.eos_token_id = 5, None
    return model, TrOCRProcessor(ViTImageProcessorPil(size={"height": 32, "width": 32}), _bytes())


def _bytes() -> PreTrainedTokenizerFast:
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<|endoftext|>")
    return PreTrainedTokenizerFast(tokenizer_object=whisper()[1].tokenizer.backend_tokenizer, **special)
