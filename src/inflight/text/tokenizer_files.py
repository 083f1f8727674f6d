"""Loads tokenizers from a folder, a repository on the Hugging Face hub, or a GGUF file. `transformers` is imported only
when one is read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from inflight.contracts.config import EngineConfig
from inflight.contracts.errors import ModelError
from inflight.contracts.options import is_loaded_model, is_loaded_tokenizer
from inflight.gguf.find import find_gguf
from inflight.gguf.header import GgufHeader
from inflight.text.gguf_pre_tokenizers import set_pre_tokenizer
from inflight.text.tokenizer import Tokenizer, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    TokenizerSource: TypeAlias = str | os.PathLike[str] | PreTrainedTokenizerBase

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
    if is_loaded_tokenizer(tokenizer):
        return Tokenizer(tokenizer)
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

    try:
        inner = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, revision=revision)
    except Exception as error:  # a damaged file can raise anything
        raise ModelError(f"cannot load the tokenizer of {source!r}: {one_line(error)}") from error
    if len(inner) > len(inner.all_special_ids):
        return Tokenizer(inner)
    if is_folder:
        raise ModelError(f"cannot load the tokenizer of {source!r}: its files hold no vocabulary")
    return None  # a repository without tokenizer files


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
