"""The named workloads on which inflight is compared with other engines, given by their lengths. Standard library only.

`benchmarks/workloads.py` has the same workloads for engines that are not servers. Their Python environments cannot
import this package, so the lengths are written twice, and a test keeps them equal.

Random prompts, as token ids or as words. Decides their content; the lengths are given.

Token ids are exact. A word is one token in most vocabularies, so a prompt of words has only about the given length; its
exact length is what the server counts.

`Sketch`: a planned request, before it is known whether the server accepts token ids. Plain data.

Lengths of random requests depend only on the seed, not on the server, the form of prompts or arrival times.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from inflight.simulate import Lengths

Prompt: TypeAlias = str | list[int] | list[Mapping[str, Any]]
"""Text, token ids, or a chat's messages."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A planned request.

    Attributes:
        prompt: the prompt, or a number of random tokens that follow the shared prefix.
        num_output_tokens: most tokens to generate (exactly as many, if the server supports that).
        arrival: seconds after the start; None: the arrival times of the run decide.
    """

    prompt: Prompt | int
    num_output_tokens: int
    arrival: float | None = None


def random_sketches(num_requests: int, inputs: Lengths, outputs: Lengths, seed: int) -> list[Sketch]:
    """Return requests with random prompts of random lengths."""
    rng = np.random.default_rng((seed, 0))
    prompts, answers = inputs.draw(rng, num_requests), outputs.draw(rng, num_requests)
    return [Sketch(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def repeated(sketches: Sequence[Sketch], num_requests: int | None) -> list[Sketch]:
    """Return the first `num_requests` sketches, starting over if there are fewer; None: each once."""
    if num_requests is None:
        return list(sketches)
    return [sketches[number % len(sketches)] for number in range(num_requests)]


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


NUM_REQUESTS = 32
LENGTH_SEED = 1234


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of given lengths.

    Attributes:
        lengths: prompt tokens (random) and output tokens of each request.
        num_prefix_tokens: length of a prefix that all prompts share.
    """

    lengths: list[tuple[int, int]]
    num_prefix_tokens: int = 0

    @property
    def sketches(self) -> list[Sketch]:
        return [Sketch(prompt, output) for prompt, output in self.lengths]


def _heavy_tailed() -> list[tuple[int, int]]:
    rng = random.Random(LENGTH_SEED)
    return [
        (rng.randint(16, 256), rng.randint(8, 32) if rng.random() < 0.75 else rng.randint(64, 160))
        for _ in range(NUM_REQUESTS)
    ]


WORKLOADS: Mapping[str, Workload] = {
    "W1": Workload([(7, 100 if number % 8 == 0 else 10) for number in range(NUM_REQUESTS)]),
    "W2": Workload(_heavy_tailed()),
    "W3": Workload([(16, 32)] * NUM_REQUESTS, num_prefix_tokens=512),
}
"""W1: outputs of 10 tokens, every eighth of 100. W2: heavy-tailed outputs. W3: a common prefix of 512 tokens."""
