"""Markers in grammars: text that may be single tokens, which grammars do not treat as text.

Writes markers so that their tokens can be generated.
"""

import json
import re
from collections.abc import Mapping

from inflight.text.tokenizer import Tokenizer


def opaque_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Return the ids of added tokens that grammars treat as having no text, by their text: special tokens, and all that
    look like `<this>`."""
    return {
        token.content: token_id
        for token_id, token in tokenizer.inner.added_tokens_decoder.items()
        if not tokenizer.has_text(token_id) or (token.content.startswith("<") and token.content.endswith(">"))
    }


def pieces_of(mark: str, tokens: Mapping[str, int]) -> list[str | int]:
    """Divide a marker into text and ids of `opaque_tokens`, longer tokens first."""
    if not tokens:
        return [mark] if mark else []
    known = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    return [tokens.get(piece, piece) for piece in re.split(f"({known})", mark) if piece]


def written_mark(mark: str, tokens: Mapping[str, int]) -> str:
    """Return a mark in Lark's notation; "" for an empty one."""
    return " ".join(f"<[{piece}]>" if isinstance(piece, int) else quoted(piece) for piece in pieces_of(mark, tokens))


def quoted(text: str) -> str:
    """Return a string in Lark's notation, which is JSON's; an empty string becomes nothing."""
    # "::=" would mark the grammar as GBNF.
    return json.dumps(text, ensure_ascii=False).replace("::=", ":\\u003a=") if text else ""
