"""A GGUF file's tokenizer splits texts as the original tokenizer of its `tokenizer.ggml.pre` does."""

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from inflight.text import Tokenizer
from inflight.text.tokenizer_files import PATTERNS, WHOLE_WORDS, read_tokenizer
from tests.gguf.files import write_vocabulary

TEXTS = [
    "a1234 12345678 3.14159, v2.0",
    " ١٢ ١٢٣٤ x²½ Ⅷ㊿",
    "你好世界，今天123天气。カタカナ ひらがな 한국어 ㄅㄆ!",
    "für ó Grüße straße Ἀθῆναι ՀԱՅ հայերեն ქართული मराठी नमस्ते е\u0301 e\u0301",
    "I'm SHE'LL don't'S x'ré 'tis iPhone HELLOworld",
    "I\n\n  1 a  b\n\n  c\r\n\td \n \n   ",
    "x==y && foo(bar[0])!?  $5+`z` … “quoted”/path/\n//c <|x|> #tag ,. ।",
    "𝐀𝐁 😀👍🏽 \u3000　。\u2026 end",
]


def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """A `tokenizer.json` with "Split" for each pattern, and "ByteLevel" behind them."""
    steps = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def then(*steps: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(list(steps))


DIGITS = pre_tokenizers.Digits(individual_digits=True)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT4O = (
    rf"{CAPITALS}*{SMALL}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|{CAPITALS}+{SMALL}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM = " ?[^(\\s|[.,!?…。，、।۔،])]+"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_LETTERS = (
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7d"
    "ᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎ"
    "ꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
DEEPSEEK_CJK = "[一-龥\u0800-一가-\ud7ff]+"
ORIGINALS: dict[str, Any] = {
    "gpt-2": byte_level(),
    "mpt": byte_level(),
    "phi-2": byte_level(),
    "olmo": byte_level(),
    "starcoder": then(DIGITS, byte_level()),
    "refact": then(DIGITS, byte_level()),
    "command-r": then(DIGITS, byte_level()),
    "smollm": then(DIGITS, byte_level()),
    "codeshell": then(DIGITS, byte_level()),
    "exaone": then(DIGITS, byte_level()),
    "llama-bpe": split(LLAMA3),
    "glm4": split(LLAMA3),
    "chatglm-bpe": split(LLAMA3),
    "qwen2": split(QWEN2),
    "stablelm2": split(QWEN2),
    "hunyuan": split(QWEN2),
    "laguna": split(r"[^\n]+|[\n]+", QWEN2),
    "gpt-4o": split(GPT4O),
    "tekken": split(GPT4O.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")),
    "tiny_aya": split(r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O),
    "minicpm5": split(r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")),
    "seed-coder": split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "bailingmoe": split(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "bloom": split(BLOOM),
    "superbpe": split(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "viking": then(
        pre_tokenizers.Split(Regex(BLOOM), "isolated"),
        DIGITS,
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
    "falcon": then(
        pre_tokenizers.Punctuation("contiguous"),
        byte_level(),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ),
    "deepseek-llm": then(
        *(
            pre_tokenizers.Split(Regex(each), "isolated")
            for each in ("[\r\n]", DEEPSEEK_LETTERS, "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", "\\s+$", DEEPSEEK_CJK)
        ),
        DIGITS,
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
    "deepseek-coder": then(
        *(
            pre_tokenizers.Split(Regex(each), "isolated")
            for each in ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK)
        ),
        DIGITS,
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
    "deepseek-v3": split(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK3),
}
"""As in the `tokenizer.json` (or the tokenizer's code) that the models were published with."""


@pytest.fixture(scope="module")
def vocabulary() -> PreTrainedTokenizerFast:
    """Merges cross every border of words, so that a text that is split otherwise has other tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([part for text in TEXTS for part in (text, *text.split(" "))] * 2, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def read(path: Path, vocabulary: PreTrainedTokenizerFast, pre: str | None) -> Tokenizer:
    write_vocabulary(path / "model.gguf", vocabulary, pre)
    tokenizer = read_tokenizer(str(path / "model.gguf"))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("name", ORIGINALS)
def test_texts_become_the_tokens_of_the_original_tokenizer(
    name: str, vocabulary: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer = read(tmp_path, vocabulary, name)
    assert tokenizer.notes == ()
    original = Backend.from_str(vocabulary.backend_tokenizer.to_str())
    original.pre_tokenizer = ORIGINALS[name]
    if name in ("qwen2", "command-r"):
        original.normalizer = normalizers.NFC()
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids, text


def test_every_original_tokenizer_splits_these_texts_in_its_own_way() -> None:
    """So that taking one for another shows."""
    groups = {str([each.pre_tokenize_str(text) for text in TEXTS]) for each in ORIGINALS.values()}
    assert len(groups) == 17


@pytest.mark.parametrize("name", " ".join([*PATTERNS, WHOLE_WORDS]).split())
def test_no_known_name_loses_a_character(name: str, vocabulary: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer = read(tmp_path, vocabulary, name)
    assert tokenizer.notes == ()
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) in (text, unicodedata.normalize("NFC", text))


def test_a_word_of_the_vocabulary_is_one_token_even_where_no_merge_leads_to_it(tmp_path: Path) -> None:
    """`ignore_merges` of Llama 3's tokenizer."""
    vocabulary = {each: number for number, each in enumerate([*pre_tokenizers.ByteLevel.alphabet(), "ab", "abc"])}
    inner = PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE(vocabulary, [("a", "b")])))
    tokens = {name: read(tmp_path, inner, name).encode("abc") for name in ("llama-bpe", "qwen2")}
    assert tokens == {
        "llama-bpe": [vocabulary["abc"]],
        "qwen2": [vocabulary["ab"], vocabulary["c"]],
    }


@pytest.mark.parametrize(("name", "said"), [("qwen9", "'qwen9', which is unknown"), (None, "names no pre-tokenizer")])
def test_what_is_assumed_for_an_unknown_name_is_said(
    name: str | None, said: str, vocabulary: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer = read(tmp_path, vocabulary, name)
    (note,) = tokenizer.notes
    assert said in note
    assert "split as for GPT-2" in note
    assert tokenizer.encode(TEXTS[0]) == read(tmp_path, vocabulary, "gpt-2").encode(TEXTS[0])
