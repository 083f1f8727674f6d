"""Log-probabilities in three formats: OpenAI's for completions, OpenAI's for chats, vLLM's for prompts. JSON has no
infinities, so values below `LEAST` are reported as `LEAST`, as in vLLM.
"""

from collections.abc import Sequence
from typing import Any

from inflight.contracts.api.outputs import Logprob, TokenLogprobs
from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer

LEAST = -9999.0

Positions = Sequence[TokenLogprobs | None]
"""One entry per token; None if unknown, as for a prompt's first token."""


class TextOffsets:
    """Offsets of a text's tokens, in characters; all tokens of an incomplete character have its offset.

    Args:
        context: the tokens before the first one.
        start: where the first one begins.
        skip_special_tokens: whether special tokens are left out of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        context: Sequence[int] = (),
        start: int = 0,
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._next = start
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(tokenizer, context, skip_special_tokens)

    def place(self, token_id: int, text: str) -> int:
        """Return the next token's offset. Without a tokenizer, `text` is its text."""
        begin = self._next
        self._next += len(text if self._detokenizer is None else self._detokenizer.append([token_id]))
        return begin


def of_completion(
    token_ids: Sequence[int],
    positions: Positions,
    num_top: int,
    tokenizer: Tokenizer | None,
    offsets: TextOffsets,
    end: int | None = None,
) -> dict[str, Any]:
    """Return `logprobs` of a choice of `/v1/completions`.

    Args:
        num_top: how many of the likeliest tokens are reported at each position, in addition to the token itself.
        offsets: gives the places of the tokens in the choice's text.
        end: the end of the text, if known: tokens of a stop string may follow it.
    """
    tokens, of_tokens, tops, places = [], [], [], []
    for token_id, position in zip(token_ids, positions, strict=True):
        own = None if position is None else position[token_id]
        text = _text(token_id, own, tokenizer)
        tokens.append(text)
        of_tokens.append(None if own is None else _finite(own))
        tops.append(None if position is None else _alternatives(position, token_id, num_top, tokenizer))
        place = offsets.place(token_id, text)
        places.append(place if end is None else min(place, end))
    return {"tokens": tokens, "token_logprobs": of_tokens, "top_logprobs": tops, "text_offset": places}


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Join `of_completion`'s results for two consecutive pieces of a text."""
    return {name: first[name] + second[name] for name in first}


def of_chat(
    token_ids: Sequence[int], positions: Positions, num_top: int, tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    """Return `logprobs.content` of a choice of `/v1/chat/completions`: `num_top` alternatives for each token."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        assert position is not None  # these are generated tokens
        entry = _chat_entry(token_id, position[token_id], tokenizer)
        tops = [_chat_entry(*item, tokenizer) for item in _likeliest(position, num_top)]
        content.append({**entry, "top_logprobs": tops})
    return content


def of_prompt(positions: Positions) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` in vLLM's form: by token id."""
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": _finite(each), "rank": each.rank, "decoded_token": each.decoded_token}
            for token_id, each in position.items()
        }
        for position in positions
    ]


def _alternatives(
    position: TokenLogprobs, token_id: int, num_top: int, tokenizer: Tokenizer | None
) -> dict[str, float]:
    """Return log-probabilities by text, the likeliest first, including the token's own. If several tokens have the
    same text, the likeliest counts."""
    by_text: dict[str, float] = {}
    for other, logprob in [*_likeliest(position, num_top), (token_id, position[token_id])]:
        by_text.setdefault(_text(other, logprob, tokenizer), _finite(logprob))
    return by_text


def _likeliest(position: TokenLogprobs, number: int) -> list[tuple[int, Logprob]]:
    return sorted(position.items(), key=lambda item: -item[1].logprob)[:number]


def _chat_entry(token_id: int, logprob: Logprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    text = _text(token_id, logprob, tokenizer)
    of_token = text.encode(errors="replace") if tokenizer is None else tokenizer.bytes_of(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(of_token)}


def _text(token_id: int, logprob: Logprob | None, tokenizer: Tokenizer | None) -> str:
    if logprob is not None and logprob.decoded_token is not None:
        return logprob.decoded_token
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.text_of(token_id)


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST)
