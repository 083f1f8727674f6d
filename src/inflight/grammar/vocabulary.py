"""A model's vocabulary as grammars see it: the bytes of each token, which ids exist, and which end a text.

Decides which ids can never be chosen: ids beyond the tokenizer's (a model's logits may be wider) and, unless a grammar
names them, special tokens. Knows no grammar.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

from inflight.contracts.api.errors import InvalidRequestError
from inflight.text.tokenizer import Tokenizer

Words: TypeAlias = npt.NDArray[np.int32]
"""One bit for each token id, 32 to a word, the lowest bit first."""

# SentencePiece without byte fallback, in the library's terms.
_METASPACE = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]


class Vocabulary:
    """The bytes of each token, in the library's table, and the ids that may be chosen at all.

    Args:
        tokenizer: a fast tokenizer, byte-level or SentencePiece.
        vocab_size: the width of the model's logits, V.
        eos_token_ids: the tokens that end a sequence, possibly none; ids of V and above are never chosen.

    Raises InvalidRequestError if the bytes of the tokenizer's tokens cannot be determined.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(each for each in eos_token_ids if 0 <= each < vocab_size)
        stop_id = tokenizer.vocab_size
        size = max(vocab_size, stop_id + 1)
        try:
            self.table = LLTokenizer(_definition(tokenizer, stop_id), n_vocab=size, eos_token=stop_id)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's panics are not `Exception`s
            reason = str(error).partition(":")[0].partition("\n")[0]
            raise InvalidRequestError(f"this model's tokenizer allows no structured output: {reason}") from error
        self.num_table_words = num_words(size)
        self.num_words = num_words(vocab_size)
        token_ids = np.arange(self.num_words * 32)
        is_eos = np.isin(token_ids, list(self.eos_token_ids))
        is_misread = np.isin(token_ids, list(self._misread(tokenizer)))
        self.tokens = _pack((token_ids < min(vocab_size, tokenizer.vocab_size)) & ~is_eos & ~is_misread)
        self.eos = _pack(is_eos)

    def _misread(self, tokenizer: Tokenizer) -> Iterator[int]:
        """Yield added tokens whose bytes in the table differ from their text: some with letters beyond ASCII."""
        for token_id, token in tokenizer.inner.added_tokens_decoder.items():
            if not token.special and self.table.decode_bytes([token_id]) != token.content.encode():
                yield token_id

    def has(self, token_id: int) -> bool:
        """Whether the token can be chosen and does not end a sequence."""
        return 0 <= token_id < self.vocab_size and bool(self.tokens[token_id // 32] >> (token_id % 32) & 1)


def num_words(num_tokens: int) -> int:
    """Return how many words hold one bit for each of `num_tokens` tokens."""
    return -(-num_tokens // 32)


def _definition(tokenizer: Tokenizer, stop_id: int) -> str:
    """Return the tokenizer as JSON of the `tokenizers` library, with a decoder that the grammar library knows.

    The library needs one EOS that no grammar names. An extra token serves as this EOS, whatever the model has."""
    if not tokenizer.inner.is_fast:
        raise ValueError("it is a slow tokenizer, written in Python")
    if max(tokenizer.inner.get_vocab().values()) >= tokenizer.vocab_size:
        raise ValueError("there are gaps between its token ids")
    definition: dict[str, Any] = json.loads(tokenizer.inner.backend_tokenizer.to_str())
    definition["truncation"] = definition["padding"] = None
    stop = {"id": stop_id, "content": "<|inflight:stop|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    definition["added_tokens"].append(stop | flags)
    if (definition["decoder"] or {}).get("type") == "Metaspace":
        definition["decoder"] = {"type": "Sequence", "decoders": _METASPACE}
    return json.dumps(definition)


def _pack(is_allowed: npt.NDArray[np.bool_]) -> Words:
    """Pack flags `[n]` bool into `Words` `[n / 32]`; n is a multiple of 32."""
    return np.packbits(is_allowed, bitorder="little").view(np.int32)
