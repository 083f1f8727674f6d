"""Helpers for the grammar tests: compilers over small vocabularies, masks as sets, random walks."""

import random
from collections.abc import Iterable

import numpy as np

from inflight.contracts.api.structured_output import StructuredOutput
from inflight.grammar import GrammarCompiler, GrammarMatcher
from inflight.text.detokenizer import IncrementalDetokenizer
from inflight.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import ALL

NUM_PADDING = 45
TOKENIZERS = {name: ALL[name] for name in ("byte_level", "straddling", "byte_fallback")}
_CLOSING = ('"', "}", "]", ")", "n", "u", "l", ":", ",", "0")  # tokens that lead to an end, the most reliable first

WIDE = 'start: "(" ' + " ".join(f'"a{number}"?' for number in range(2500))
"""A grammar that can be compiled and started, and is too ambiguous to follow after its first character."""


def compiler(tokenizer: Tokenizer, eos_token_ids: Iterable[int] | None = None) -> GrammarCompiler:
    """A compiler for a model whose vocabulary is wider than that of its tokenizer."""
    eos = [tokenizer.eos_token_id] if eos_token_ids is None else eos_token_ids
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + NUM_PADDING, eos)


def matcher(tokenizer: Tokenizer, **asked: object) -> GrammarMatcher:
    return compiler(tokenizer).compile(StructuredOutput(**asked))


def allowed(matcher: GrammarMatcher, tokenizer: Tokenizer) -> list[int]:
    """The token ids that the mask allows."""
    words = np.full(-(-(tokenizer.vocab_size + NUM_PADDING) // 32), -1, dtype=np.int32)
    matcher.fill_mask(words)
    return ids(words)


def ids(words: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def write(matcher: GrammarMatcher, tokenizer: Tokenizer, text: str) -> int:
    """Accept a text in the smallest possible tokens, and return how many of them were accepted."""
    accepted = 0
    for token_id in spelled(tokenizer, text):
        if not matcher.accept(token_id):
            break
        accepted += 1
    return accepted


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text in the smallest possible tokens."""
    if token_of_byte := {byte: token_id for token_id, byte in tokenizer.byte_of_token.items()}:
        return [token_of_byte[byte] for byte in text.encode()]
    return [token_id for each in text for token_id in tokenizer.inner.encode(each, add_special_tokens=False)]


def walk(matcher: GrammarMatcher, tokenizer: Tokenizer, rng: random.Random, num_wandering: int) -> str:
    """The text of a random walk over allowed tokens, which heads for its end after `num_wandering` tokens."""
    token_ids: list[int] = []
    closing = [token_id for text in _CLOSING for token_id in spelled(tokenizer, text)]
    while not matcher.is_finished:
        choices = allowed(matcher, tokenizer)
        assert (tokenizer.eos_token_id in choices) == matcher.may_stop
        if len(token_ids) >= num_wandering:
            if matcher.may_stop:
                break
            if rng.random() < 0.7:  # not always: a token that closes one thing can continue another forever
                choices = [each for each in closing if each in choices][:1] or choices
        token_id = rng.choice(choices)
        assert matcher.accept(token_id), f"{token_id} was allowed behind {token_ids}"
        if token_id != tokenizer.eos_token_id:
            token_ids.append(token_id)
        assert len(token_ids) < 3000, "a walk without an end"
    prompt = spelled(tokenizer, "a")
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return detokenizer.append(token_ids) + detokenizer.finish()
