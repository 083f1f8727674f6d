"""Pre-tokenization of byte-level vocabularies, by the name in a GGUF file's `tokenizer.ggml.pre`.

The names are llama.cpp's, the patterns those of the models' own tokenizers. `transformers` has the others.
"""

from typing import Any

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SUFFIX, WORD, BLANKS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\s*[\r\n]+|\s+(?!\S)|\s+"
BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
DEEPSEEK_CASED = (
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\uab68"
    r"\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{1df2a}]]+"
)
"""The original lists the ranges of cased letters, except for some scripts."""
DEEPSEEK_MARKS = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
DEEPSEEK_CJK, DEEPSEEK3_CJK = r"[\u0800-\u9fa5\uac00-\ud7ff]+", r"[\u4e00-\u9fa5\u3040-\u30ff]+"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
)
IN_BYTES = ""
"""Marks the step that maps text to bytes, if it is not the last: later patterns see the byte characters."""
PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
    "modern-bert mpt olmo jais trillion granite-docling exaone4": (GPT2,),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": (r"\p{N}", GPT2),
    "chatglm-bpe glm4": ("llama3",),
    "stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2 llada-moe": ("qwen2",),
    "laguna": (r"[^\n]+|\n+", "qwen2"),
    "tiny_aya cohere2moe": (r"\d{1,3}(?=(?:\d{3})*\b)", "gpt-4o"),
    "minicpm5": (r"\p{N}{1,3}", rf"{SUFFIX}|{WORD}|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"),
    "seed-coder": (rf"{SUFFIX}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{BLANKS}",),
    "poro-chat bloom gpt3-finnish": (BLOOM,),
    "viking": (BLOOM, r"\p{N}"),
    "falcon": (r"[\p{P}$+<=>^`|~]+", GPT2, IN_BYTES, r"\p{N}+", "[0-9][0-9][0-9]"),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "deepseek-llm": (r"[\r\n]", DEEPSEEK_CASED, DEEPSEEK_MARKS, r"\s+$", DEEPSEEK_CJK, r"\p{N}"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}"),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (r"\p{N}{1,3}", DEEPSEEK3_CJK, DEEPSEEK3 + BLANKS),
}
"""The patterns that split texts, in order. A name stands for one in `transformers`."""
WHOLE_WORDS = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken minicpm5"
"""Those that make a word one token if it is in the vocabulary, regardless of merges."""


def set_pre_tokenizer(backend: Any, name: Any) -> tuple[str, ...]:
    """Set the pre-tokenizer of this name on a `tokenizers.Tokenizer`. Returns a note if it is unknown."""
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as SPLITS

    patterns = next((each for names, each in PATTERNS.items() if name in names.split()), (name,))
    if patterns == (name,) and name not in SPLITS:
        said = "names no pre-tokenizer" if name is None else f"names the pre-tokenizer {name!r}, which is unknown"
        return (f"the file {said}: texts are split as for GPT-2, and may become other tokens than in training",)
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = [pre_tokenizers.Split(Regex(SPLITS.get(each, each)), "isolated") if each else in_bytes for each in patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps if IN_BYTES in patterns else [*steps, in_bytes])
    backend.model.ignore_merges = name in WHOLE_WORDS.split()
    if name in ("qwen2", "qwen35", "command-r"):
        backend.normalizer = normalizers.NFC()
    return ()
