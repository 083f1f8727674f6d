"""Loads tokenizers from a folder, a repository on the Hugging Face hub, or a GGUF file. `transformers` is imported only
when one is read.

Pre-tokenization of byte-level vocabularies, by the name in a GGUF file's `tokenizer.ggml.pre`.

The names are llama.cpp's, the patterns those of the models' own tokenizers. `transformers` has the others.
"""

from __future__ import annotations

import copy
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.contracts.api.options import is_loaded_model, is_loaded_processor, is_loaded_tokenizer
from inflight.gguf.find import find_gguf
from inflight.gguf.header import GgufHeader
from inflight.text.processor import Processor, has_mistrals_format
from inflight.text.tokenizer import Tokenizer, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    TokenizerSource: TypeAlias = str | os.PathLike[str] | PreTrainedTokenizerBase
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
"""Where text is mapped to bytes, if that is not the last step: later patterns see the byte characters."""
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


# A folder with none of these has no tokenizer. `AutoTokenizer` cannot be asked: from a config.json alone it makes a
# tokenizer with an empty vocabulary.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
)

NO_CHATS = "without a chat template the model cannot chat: mistral-common writes one (pip install mistral-common)"

SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Names of role tokens in a tokenizer and in a GGUF file."""
ENDS = ("eos", "eot", "eom")
"""A GGUF file's keys of the tokens that end a sequence, a turn, and a message that waits for a tool."""
NO_TOKEN = (-1, 2**32 - 1)
"""GGUF's value of an unassigned role."""


def load_tokenizer(
    model: str | PreTrainedModel, tokenizer: TokenizerSource | None, config: EngineConfig
) -> Tokenizer | None:
    """The given tokenizer, else the model's; None if there is none. Raises `ModelError`."""
    loaded = _load_tokenizer(model, tokenizer, config)
    if loaded is not None:
        loaded.limits = config.limit_mm_per_prompt or {}
    return loaded


def _load_tokenizer(
    model: str | PreTrainedModel, tokenizer: TokenizerSource | None, config: EngineConfig
) -> Tokenizer | None:
    if is_loaded_tokenizer(tokenizer):
        return Tokenizer(tokenizer)
    if is_loaded_processor(tokenizer):
        processor: Any = tokenizer
        inner = copy.copy(processor.tokenizer)
        inner.chat_template = inner.chat_template or processor.chat_template
        return Tokenizer(inner, load_processor=lambda: Processor(processor, getattr(model, "config", None)))
    if tokenizer is None and is_loaded_model(model):
        return None
    source = model if tokenizer is None else tokenizer
    if not isinstance(source, str | os.PathLike):
        raise ModelError(f"the tokenizer is a {type(source).__name__}; it must be a hub id, a folder, or a loaded one")
    name = os.path.expanduser(os.fspath(source))
    loaded = read_tokenizer(name, trust_remote_code=config.trust_remote_code, revision=config.revision)
    if loaded is None and tokenizer is not None:
        raise ModelError(f"there is no tokenizer in {name!r}")
    return loaded


def read_tokenizer(source: str, *, trust_remote_code: bool = False, revision: str | None = None) -> Tokenizer | None:
    """The tokenizer of a local folder, of a repository on the Hugging Face hub, or of a GGUF file; None if it has none.

    Raises:
        ModelError: `source` cannot be reached, or its tokenizer cannot be read.
    """
    gguf = find_gguf(source, revision)
    if gguf is not None:
        return _from_gguf(gguf)
    is_folder = Path(source).is_dir()
    if not is_folder and (Path(source).is_absolute() or Path(source).exists()):
        raise ModelError(f"cannot load the tokenizer of {source!r}: there is no such folder")
    if is_folder and not any((Path(source) / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        inner = AutoTokenizer.from_pretrained(source, mistral_format=False, **options)
        if is_mistrals := has_mistrals_format(inner):
            inner = _from_tekken(inner.vocab_file)
        if not inner.chat_template:
            inner.chat_template = _processors_template(source, revision)
    except Exception as error:  # a damaged file can raise anything
        raise ModelError(f"cannot load the tokenizer of {source!r}: {one_line(error)}") from error
    if len(inner) > len(inner.all_special_ids):
        notes = (NO_CHATS,) if is_mistrals and not inner.chat_template else ()
        load = partial(Processor.load, source, inner, **options)
        return Tokenizer(inner, notes=notes, load_processor=load)
    if is_folder:
        raise ModelError(f"cannot load the tokenizer of {source!r}: its files hold no vocabulary")
    return None  # a repository without tokenizer files


def _processors_template(source: str, revision: str | None) -> str | None:
    """The chat template in the files of a multimodal model's processor, where older checkpoints have it; None: none."""
    from transformers.utils import LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, cached_file

    path = cached_file(
        source,
        LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else str(json.loads(Path(path).read_text())["chat_template"])


def _from_tekken(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a file in Mistral's own format; mistral-common, where it is installed, writes its template."""
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    inner = convert_tekken_tokenizer(path)
    inner.add_bos_token = True
    inner.update_post_processor()
    if inner.chat_template:
        inner.chat_template = inner.chat_template.replace("'input_audio'", "'audio'")  # the type of our parts
    return inner


class _Handed:
    """Prevents `transformers`' deep copy of a given tokenizer, which takes more than a second for a vocabulary of
    262,144 tokens."""

    def __init__(self, tokenizer: object) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: object) -> object:
        return self._tokenizer


def _from_gguf(path: Path) -> Tokenizer | None:
    """As `get_gguf_tokenizer` of `transformers`, which imports torch to read the header."""
    metadata = GgufHeader.read(path, with_vocabulary=True).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    given, options = (
        {name: metadata[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in metadata}
        for names in (GGUF_TOKENIZER_MAPPING["tokenizer"], GGUF_TOKENIZER_MAPPING["tokenizer_config"])
    )
    kind = given.get("tokenizer_type")
    if kind == "llama":
        options.setdefault("add_bos_token", True)  # files from before there was such a key
    elif kind == "gemma4":
        options["add_bos_token"] = False  # its chat template writes one

    def token_of(role: str) -> int | None:
        """Drop a role that is unassigned, or outside the vocabulary, if nothing here depends on it."""
        token_id, size = metadata.get(key := f"tokenizer.ggml.{role}_token_id"), len(given["tokens"])
        if token_id is None or (isinstance(token_id, int) and 0 <= token_id < size):
            return token_id
        if options.get(f"add_{role}_token") or (role in ENDS and token_id not in NO_TOKEN):
            raise ValueError(f"the file's {key!r} is {token_id}, which is not below {size}, the size of its vocabulary")
        return None

    try:
        for name, role in SPECIAL_TOKENS.items():
            token_id = token_of(role)
            options[f"{name}_token"] = None if token_id is None else given["tokens"][token_id]
        ends = {f"tokenizer.ggml.{role}_token_id": each for role in ENDS if (each := token_of(role)) is not None}
        backend, _ = convert_gguf_tokenizer(metadata["general.architecture"], given)
        notes = set_pre_tokenizer(backend, given.get("pre_tokenizer_type")) if kind == "gpt2" else ()
        inner = PreTrainedTokenizerFast(tokenizer_object=_Handed(backend), **options)
        return Tokenizer(inner, ends, notes)
    except Exception as error:
        missing = [key for key, name in GGUF_TOKENIZER_MAPPING["tokenizer"].items() if error.args == (name,)]
        is_missing = isinstance(error, KeyError) and missing
        reason = f"the file has no 'tokenizer.{missing[0]}'" if is_missing else one_line(error)
        raise ModelError(f"cannot load the tokenizer of {str(path)!r}: {reason}") from error
