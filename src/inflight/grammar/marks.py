"""Marks in grammars: text for which a vocabulary may have tokens of its own, and which grammars take for no text.

Decides how a mark is written, so that its tokens can be generated where it must come.
"""

import json
import re
from collections.abc import Mapping

from inflight.text.tokenizer import Tokenizer


def opaque_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Return the ids of added tokens that grammars take for tokens without text, by their text: special tokens, and all
    that look like `<this>`."""
    return {
        token.content: token_id
        for token_id, token in tokenizer.inner.added_tokens_decoder.items()
        if not tokenizer.has_text(token_id) or (token.content.startswith("<") and token.content.endswith(">"))
    }


def pieces_of(mark: str, tokens: Mapping[str, int]) -> list[str | int]:
    """Divide a mark into text and the ids of tokens that `opaque_tokens` has found; longer tokens first."""
    if not tokens:
        return [mark] if mark else []
    known = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    return [tokens.get(piece, piece) for piece in re.split(f"({known})", mark) if piece]


def written_mark(mark: str, tokens: Mapping[str, int]) -> str:
    """Return a mark in Lark's notation; "" for an empty one."""
    return " ".join(f"<[{piece}]>" if isinstance(piece, int) else quoted(piece) for piece in pieces_of(mark, tokens))


def quoted(text: str) -> str:
    """Return a string in Lark's notation, which is JSON's; an empty string becomes nothing."""
    # "::=" would be taken to mean that the grammar is in another notation.
    return json.dumps(text, ensure_ascii=False).replace("::=", ":\\u003a=") if text else ""
