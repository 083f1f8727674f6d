"""Random prompts, as token ids or as words. Decides their content; the lengths are given.

Token ids are exact. A word is one token in most vocabularies, so a prompt of words has only about the given length; the
server counts the exact length.
"""

import random
from collections.abc import Sequence

from inflight.loadtest.sketch import Prompt, Sketch

FIRST_TOKEN_ID = 300
"""The smallest random token id; special tokens and single bytes are below."""

_COMMON_WORDS = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother area
    money story fact month lot right study book eye job word business issue side kind head house service friend father
    power hour game line end member law car city community name president team minute idea body information back parent
    face others level office door health person art war history party result change morning reason research girl guy
    moment air teacher force education good new first last long great little own other old big high different small
    large next early young important few public bad same able come make know take see get go find give tell work call
    try ask need feel become leave put mean keep let begin seem help talk turn start show hear play run move like live
    believe hold bring happen write provide sit stand lose pay meet include continue set learn lead understand watch
    follow stop create speak read allow add spend grow open walk win offer remember love consider appear buy wait serve
"""
WORDS = tuple(_COMMON_WORDS.split())


def write_prompts(
    sketches: Sequence[Sketch],
    *,
    num_prefix_tokens: int = 0,
    num_prefixes: int = 1,
    vocab_size: int | None,
    seed: int = 0,
) -> list[Prompt]:
    """Return the sketches' prompts; where a sketch has a number, the prompt has as many random tokens.

    Args:
        num_prefix_tokens: length of a random prefix that random prompts share.
        num_prefixes: how many such prefixes there are, of which each prompt has one, equally often on average.
        vocab_size: token ids are below this; None: words instead of token ids.

    The same arguments give the same prompts. A different seed gives different prompts, so that a server's prefix cache
    has none of them from an earlier run.
    """
    rng = random.Random(f"prompts of seed {seed}")

    def tokens(count: int) -> list[str] | list[int]:
        if vocab_size is None:
            return rng.choices(WORDS, k=count)
        return [rng.randrange(min(FIRST_TOKEN_ID, vocab_size - 1), vocab_size) for _ in range(count)]

    prefixes = [tokens(num_prefix_tokens) for _ in range(num_prefixes)]

    def prefix() -> list[str] | list[int]:
        return rng.choice(prefixes) if num_prefixes > 1 else prefixes[0]

    return [
        _joined([*prefix(), *tokens(sketch.prompt)]) if isinstance(sketch.prompt, int) else sketch.prompt
        for sketch in sketches
    ]


def _joined(tokens: list[str | int]) -> Prompt:
    words = [token for token in tokens if isinstance(token, str)]
    return " ".join(words) if words else [token for token in tokens if isinstance(token, int)]
