"""Reads a checkpoint's `generation_config`: default sampling parameters, EOS tokens, and unsupported settings."""

from transformers import GenerationConfig

from inflight.contracts.params import SamplingParams

NOT_HONOURED = {
    *("num_beams", "penalty_alpha", "guidance_scale", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "exponential_decay_length_penalty"),
    *("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens", "max_length", "stop_strings"),
    *("num_return_sequences", "watermarking_config", "max_time"),
}
"""Settings that change `model.generate`'s output, but not ours."""


def default_sampling_params(generation_config: GenerationConfig) -> SamplingParams:
    """Its sampling parameters, else `SamplingParams()`."""
    asked = generation_config.to_diff_dict()
    defaults = {name: asked[name] for name in ("temperature", "top_k", "top_p", "min_p") if asked.get(name) is not None}
    if asked.get("do_sample") is False:
        defaults = {"temperature": 0.0}
    if asked.get("max_new_tokens") is not None:
        defaults["max_tokens"] = asked["max_new_tokens"]
    return SamplingParams(**defaults)


def eos_token_ids(generation_config: GenerationConfig, vocab_size: int) -> tuple[int, ...]:
    """All token ids that end a sequence in `model.generate`, without those outside the vocabulary."""
    ids = generation_config.eos_token_id
    ids = [] if ids is None else [ids] if isinstance(ids, int) else ids
    return tuple(token_id for token_id in ids if 0 <= token_id < vocab_size)


def not_honoured(generation_config: GenerationConfig) -> tuple[str, ...]:
    """Notes on settings that this engine ignores."""
    asked = generation_config.to_diff_dict()
    return tuple(
        f"generation_config has {name}={asked[name]!r}, which is not supported"
        for name in sorted(NOT_HONOURED & asked.keys())
    )
