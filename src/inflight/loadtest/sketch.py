"""`Sketch`: a planned request, before it is known whether the server accepts token ids. Plain data.

Lengths of random requests depend only on the seed, not on the server, the form of prompts or arrival times.
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
