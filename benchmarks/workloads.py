"""The workloads on which inflight is compared with other engines: prompts, numbers of new tokens, numbers of slots.

Lengths are the same in every round, but token ids are new, so that no prefix cache carries over from round to round.
Nothing here knows an engine. Standard library only.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

NUM_REQUESTS = 32
LENGTH_SEED = 1234
FIRST_TOKEN_ID, END_OF_TOKEN_IDS = 300, 20000
"""Token ids are uniform in this half-open range, in which no model here has a special token."""

Lengths: TypeAlias = list[tuple[int, int]]
"""Prompt tokens and output tokens of each request."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids, and how many greedy tokens to generate, even past EOS."""

    prompt: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are submitted all at once.

    Attributes:
        name: the name on the command line.
        description: the text in the report.
        num_slots: how many requests may run at once.
        lengths: prompt and output length of each request; prompt lengths include the common prefix.
        num_prefix_tokens: length of the prefix that all prompts share.
        period: each prompt repeats itself after this many tokens; None: it does not.
    """

    name: str
    description: str
    num_slots: int
    lengths: Lengths
    num_prefix_tokens: int = 0
    period: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(prompt for prompt, _ in self.lengths)

    @property
    def num_output_tokens(self) -> int:
        return sum(output for _, output in self.lengths)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(prompt + output for prompt, output in self.lengths)

    def requests(self, round_number: int) -> list[Request]:
        """Return the requests of a round: the same for every engine, with token ids that no other round has."""
        rng = random.Random(f"{self.name}, round {round_number}")
        prefix = _token_ids(rng, self.num_prefix_tokens)
        return [
            Request(prefix + self._own_tokens(rng, num_prompt - len(prefix)), num_output)
            for num_prompt, num_output in self.lengths
        ]

    def _own_tokens(self, rng: random.Random, count: int) -> list[int]:
        if self.period is None:
            return _token_ids(rng, count)
        return (_token_ids(rng, self.period) * (count // self.period + 1))[:count]


def _token_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN_ID, END_OF_TOKEN_IDS) for _ in range(count)]


def _every_eighth_long() -> Lengths:
    return [(7, 100 if number % 8 == 0 else 10) for number in range(NUM_REQUESTS)]


def _heavy_tailed() -> Lengths:
    rng = random.Random(LENGTH_SEED)
    return [
        (rng.randint(16, 256), rng.randint(8, 32) if rng.random() < 0.75 else rng.randint(64, 160))
        for _ in range(NUM_REQUESTS)
    ]


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("one", "a prompt of 32 tokens; an output of 128; 1 slot", 1, [(32, 128)]),
        Workload("W1", "prompts of 7 tokens; outputs of 10, every eighth of 100; 8 slots", 8, _every_eighth_long()),
        Workload("W2-8", "prompts of 16 to 256 tokens, heavy-tailed outputs; 8 slots", 8, _heavy_tailed()),
        Workload("W2-32", "prompts of 16 to 256 tokens, heavy-tailed outputs; 32 slots", 32, _heavy_tailed()),
        Workload("prompt-4k", "a prompt of 4,096 tokens; an output of 32; 1 slot", 1, [(4096, 32)]),
        Workload("prompt-16k", "a prompt of 16,384 tokens; an output of 32; 1 slot", 1, [(16384, 32)]),
        Workload("prompt-32k", "a prompt of 32,768 tokens; an output of 32; 1 slot", 1, [(32768, 32)]),
        Workload("copy", "a text of 100 tokens three times, and once more; 1 slot", 1, [(300, 100)], period=100),
        Workload("W3", "a common prefix of 512 tokens, 16 own; outputs of 32; 16 slots", 16, [(528, 32)] * 32, 512),
    )
}
USUAL_WORKLOADS = ("one", "W1", "W2-8", "W2-32", "W3")
"""Those that are run unless others are asked for: every model has as many positions."""


def num_ideal_steps(workload: Workload) -> int:
    """Return the steps of an ideal continuous scheduler: each step gives every busy slot a token, and a slot that
    becomes free takes the next request in order for the following step."""
    slots = [0] * workload.num_slots
    for _, num_output in workload.lengths:
        slots[slots.index(min(slots))] += num_output
    return max(slots)


def num_static_steps(workload: Workload) -> int:
    """Return the steps of static waves of `num_slots` requests in order; each lasts as long as its longest request."""
    outputs = [output for _, output in workload.lengths]
    return sum(max(outputs[first : first + workload.num_slots]) for first in range(0, len(outputs), workload.num_slots))
