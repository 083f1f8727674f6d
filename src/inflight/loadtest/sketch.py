"""`Sketch`: a request as it is planned, before it is known whether the server takes token ids. Plain data.

Decides the lengths of random requests. They depend on the seed alone: neither on the server nor on how prompts are
written nor on when they are sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from inflight.simulate import Lengths

Prompt: TypeAlias = str | list[int] | list[Mapping[str, Any]]
"""Text, token ids, or a chat's messages."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A request to be.

    Attributes:
        prompt: the prompt, or a number: so many random tokens, behind the prefix that all have in common.
        num_output_tokens: the most it is to generate (exactly so many, where the server can be told to).
        arrival: seconds after the start; None: as the arrivals of the run decide.
    """

    prompt: Prompt | int
    num_output_tokens: int
    arrival: float | None = None


def random_sketches(num_requests: int, inputs: Lengths, outputs: Lengths, seed: int) -> list[Sketch]:
    """Random prompts of random lengths."""
    rng = np.random.default_rng((seed, 0))
    prompts, answers = inputs.draw(rng, num_requests), outputs.draw(rng, num_requests)
    return [Sketch(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def so_many(sketches: Sequence[Sketch], num_requests: int | None) -> list[Sketch]:
    """The first ones, and all over again if there are fewer; None: each once."""
    if num_requests is None:
        return list(sketches)
    return [sketches[number % len(sketches)] for number in range(num_requests)]
