"""Tiny encoder-decoders that hear, with their processors: Whisper's classes with a tokenizer of bytes."""

from functools import cache

import torch
from tokenizers import pre_tokenizers
from transformers import (
    PreTrainedModel,
    ProcessorMixin,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

LANGUAGES = ("en", "zh", "de")
MARKS = ("<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES))
MORE = ("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>")
SECONDS = 2
"""The longest sound that the model hears at once."""


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
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads, **lengths, **special)).eval()
        for parameter in model.parameters():
            parameter.data += 0.25 * torch.randn(parameter.shape)
    config = model.generation_config
    config.suppress_tokens = sorted({*ids.values(), *range(40)} - {ids[f"<|{code}|>"] for code in LANGUAGES})
    config.begin_suppress_tokens, config.no_timestamps_token_id = [50], ids["<|notimestamps|>"]
    config.lang_to_id = {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES}
    config.task_to_id = {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]}
    config.is_multilingual, config.max_length = True, 48
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=SECONDS)
    return model, WhisperProcessor(extractor, tokenizer)
