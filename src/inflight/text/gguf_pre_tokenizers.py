"""How a byte-level vocabulary's texts are split before merges apply, by the name in a GGUF file's `tokenizer.ggml.pre`.

The names are llama.cpp's, the patterns those of the models' own tokenizers. `transformers` knows others.
"""

from typing import Any

NUMBER, UP_TO_3, SUFFIX = r"\p{N}", r"\p{N}{1,3}", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD, MARKS, BLANKS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\uab68"
    r"\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{1df2a}]]"
)
"""The letters that DeepSeek LLM's pattern lists one by one: cased ones, except for some scripts."""
DEEPSEEK_MARKS = r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
DEEPSEEK_CJK, DEEPSEEK3_CJK = r"[\u0800-\u9fa5\uac00-\ud7ff]+", r"[\u4e00-\u9fa5\u3040-\u30ff]+"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
)
KIMI_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
IN_BYTES = ""
"""Where a text becomes bytes, if that is not the last step: the patterns behind it see the characters that stand for
bytes."""

PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
    "modern-bert mpt olmo jais trillion granite-docling exaone4": (GPT2,),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": (NUMBER, GPT2),
    "chatglm-bpe glm4": ("llama3",),
    "stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2 llada-moe": ("qwen2",),
    "laguna": (r"[^\n]+|\n+", "qwen2"),
    "granite-embed-multi-97m": ("gpt-4o",),
    "tiny_aya cohere2moe": (r"\d{1,3}(?=(?:\d{3})*\b)", "gpt-4o"),
    "minicpm5": (UP_TO_3, f"{SUFFIX}|{WORD}|{NUMBER}+|{MARKS}|{BLANKS}"),
    "ufakzeka": (f"{WORD}|{NUMBER}|{MARKS}|{BLANKS}",),
    "seed-coder": (rf"{SUFFIX}|{WORD}|{NUMBER}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{BLANKS}",),
    "poro-chat bloom gpt3-finnish": (BLOOM,),
    "viking": (BLOOM, NUMBER),
    "falcon": (r"[\p{P}$+<=>^`|~]+", GPT2, IN_BYTES, f"{NUMBER}+", "[0-9][0-9][0-9]"),
    "superbpe": (f"{NUMBER}+", r"(?=(\d{3})+(?!\d))"),
    "deepseek-llm": (r"[\r\n]", rf"\s?{CASED}+", DEEPSEEK_MARKS, r"\s+$", DEEPSEEK_CJK, NUMBER),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, NUMBER),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (UP_TO_3, DEEPSEEK3_CJK, DEEPSEEK3 + BLANKS),
    "kimi-k2": (
        rf"\p{{Han}}+|{KIMI_UPPER}*{KIMI_LOWER}+{SUFFIX}?|{KIMI_UPPER}+{KIMI_LOWER}*{SUFFIX}?|"
        rf"{UP_TO_3}|{MARKS}|{BLANKS}",
    ),
}
"""By names: patterns that split one after the other what those before have left. A name among them stands for a pattern
that `transformers` has."""
WHOLE_WORDS = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "minicpm5", "granite-embed-multi-97m"),
}
"""Where a word that the vocabulary has is one token, whether merges lead to it or not."""
COMPOSED = {"qwen2", "qwen35", "command-r"}
"""Where texts are brought into Unicode's form NFC first."""


def set_pre_tokenizer(backend: Any, name: Any) -> tuple[str, ...]:
    """Let a `tokenizers.Tokenizer` split texts as the original of this name does. Returns a note if it is unknown."""
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as SPLITS

    own = {each: patterns for names, patterns in PATTERNS.items() for each in names.split()}
    if name not in own and name not in SPLITS:
        said = "names no pre-tokenizer" if name is None else f"names the pre-tokenizer {name!r}, which is unknown"
        return (f"the file {said}: texts are split as for GPT-2, and may become other tokens than in training",)
    patterns = own.get(name, (name,))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS.get(each, each)), "isolated")
            if each != IN_BYTES
            else pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            for each in (patterns if IN_BYTES in patterns else (*patterns, IN_BYTES))
        ]
    )
    backend.model.ignore_merges = name in WHOLE_WORDS
    if name in COMPOSED:
        backend.normalizer = normalizers.NFC()
    return ()
