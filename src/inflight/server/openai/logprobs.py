"""Log-probabilities in the forms that clients know: OpenAI's for completions, OpenAI's for chats, vLLM's for prompts.

Knows the engine's `TokenLogprobs` and these three forms, not where the values come from. JSON has no infinities, so
values below `LEAST` are reported as `LEAST`, as in vLLM.
"""

from collections.abc import Sequence
from typing import Any

from inflight.contracts.outputs import Logprob, TokenLogprobs
from inflight.text.tokenizer import Tokenizer

LEAST = -9999.0

Positions = Sequence[TokenLogprobs | None]
"""One entry per token; None where nothing is known, as for a prompt's first token."""


def of_completion(
    token_ids: Sequence[int],
    positions: Positions,
    num_top: int,
    tokenizer: Tokenizer | None,
    *,
    offset: int = 0,
    skip_special_tokens: bool = True,
) -> dict[str, Any]:
    """Return `logprobs` of a choice of `/v1/completions`.

    Args:
        num_top: how many of the likeliest tokens are reported at each position, in addition to the token itself.
        offset: where in the choice's text the first token begins, in characters.
        skip_special_tokens: whether special tokens are left out of the text.
    """
    tokens, of_tokens, tops, offsets = [], [], [], []
    for token_id, position in zip(token_ids, positions, strict=True):
        own = None if position is None else position[token_id]
        text = _text(token_id, own, tokenizer)
        tokens.append(text)
        of_tokens.append(None if own is None else _finite(own))
        tops.append(None if position is None else _alternatives(position, token_id, num_top, tokenizer))
        offsets.append(offset)
        offset += len(text) if tokenizer is None or tokenizer.has_text(token_id, skip_special_tokens) else 0
    return {"tokens": tokens, "token_logprobs": of_tokens, "top_logprobs": tops, "text_offset": offsets}


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Join what `of_completion` returned for two consecutive pieces of a text."""
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
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode(errors="replace"))}


def _text(token_id: int, logprob: Logprob | None, tokenizer: Tokenizer | None) -> str:
    if logprob is not None and logprob.decoded_token is not None:
        return logprob.decoded_token
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.text_of(token_id)


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST)
