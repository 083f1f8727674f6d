"""The simulated requests: drawn from distributions, or replayed from a recording; made one at a time.

Decides arrival times, lengths and shared prefixes; knows no scheduler. Tokens have no meaning here; they are only equal
or different.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias, cast, get_args

import numpy as np

from inflight.observe.recorder import Recording
from inflight.observe.run_report import sequence_times

Shape: TypeAlias = Literal["fixed", "uniform", "exponential", "lognormal"]
VOCABULARY = 50_000
CHUNK = 4096
"""The number of requests whose lengths and times are drawn at once."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request.

    Attributes:
        arrival: seconds; if negative, the request is already waiting when the run begins.
        num_output_tokens: output tokens of each of its sequences.
    """

    request_id: str
    arrival: float
    prompt_token_ids: Sequence[int]
    num_output_tokens: tuple[int, ...]
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens, each at least 1.

    Attributes:
        shape: "fixed" (`first`), "uniform" (from `first` to `second`), "exponential" (with mean `first`), or
            "lognormal" (with mean `first`; `second` is the standard deviation of the logarithm: 1 is heavy-tailed).
    """

    shape: Shape
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parse "100" or "fixed:100", "uniform:16:256", "exponential:100", "lognormal:100:1". Raises `ValueError`."""
        shape, *numbers = text.split(":") if ":" in text else ["fixed", text]
        needed = 2 if shape in ("uniform", "lognormal") else 1
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        is_sound = shape in get_args(Shape) and len(values) == needed and all(0 < value < 1e9 for value in values)
        if not is_sound or (shape != "lognormal" and values[0] < 1) or (shape == "uniform" and values[0] > values[1]):
            raise ValueError(
                f"the lengths are {text!r}; they must be given as 100, uniform:16:256, exponential:100 (the mean) or "
                "lognormal:100:1 (mean, and deviation of the logarithm)"
            )
        return cls(cast(Shape, shape), *values)

    def draw(self, rng: np.random.Generator, count: int, at_most: float = inf) -> list[int]:
        """Return `count` random lengths; those above `at_most` are cut to it."""
        if self.shape == "fixed":
            values = np.full(count, self.first)
        elif self.shape == "uniform":
            values = rng.integers(int(self.first), int(self.second) + 1, count).astype(np.float64)
        elif self.shape == "exponential":
            values = rng.geometric(1.0 / self.first, count).astype(np.float64)
        else:
            values = rng.lognormal(np.log(self.first) - self.second**2 / 2, self.second, count)
        drawn: list[int] = np.clip(np.rint(values), 1, at_most).astype(np.int64).tolist()
        return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticLoad:
    """Synthetic requests; every iteration makes the same ones.

    Attributes:
        rate: requests per second, on average, independent of each other (Poisson); None: all arrive at time 0.
        prompt_tokens, output_tokens: distributions of lengths; a prompt's length is without the shared prefix.
        shared_prefix_tokens: length of the prefix that a share of all requests, `shared_prefix_share`, begins with.
        num_prefixes: number of different prefixes, which are equally frequent.
        max_model_len: prompt and output are cut to fit into it.
    """

    num_requests: int
    rate: float | None = None
    prompt_tokens: Lengths = Lengths("fixed", 100)
    output_tokens: Lengths = Lengths("exponential", 100)
    shared_prefix_tokens: int = 0
    shared_prefix_share: float = 1.0
    num_prefixes: int = 1
    max_model_len: int | None = None
    seed: int = 0

    def __iter__(self) -> Iterator[SimulatedRequest]:
        rng = np.random.default_rng(self.seed)
        prefixes = rng.integers(0, VOCABULARY, (self.num_prefixes, self.shared_prefix_tokens)).tolist()
        most, clock = (self.max_model_len or inf) - self.shared_prefix_tokens, 0.0
        if most < 2:
            raise ValueError(
                f"with {self.shared_prefix_tokens} shared tokens, no prompt fits {self.max_model_len} tokens"
            )
        for first in range(0, self.num_requests, CHUNK):
            count = min(CHUNK, self.num_requests - first)
            prompts = self.prompt_tokens.draw(rng, count, most - 1)
            outputs = self.output_tokens.draw(rng, count, most)
            gaps = (rng.exponential(1 / self.rate, count) if self.rate else np.zeros(count)).tolist()
            choices = rng.integers(0, self.num_prefixes, count)
            shared = np.where(rng.random(count) < self.shared_prefix_share, choices, -1).tolist()
            for number in range(count):
                clock += gaps[number]
                prompt: list[int] = rng.integers(0, VOCABULARY, prompts[number]).tolist()
                if shared[number] >= 0 and self.shared_prefix_tokens:
                    prompt = prefixes[shared[number]] + prompt
                num_outputs = int(min(outputs[number], most - prompts[number]))
                yield SimulatedRequest(str(first + number), clock, prompt, (num_outputs,))


def replay(recording: Recording) -> Iterator[SimulatedRequest]:
    """Yield a recording's requests, with their recorded arrival times and numbers of output tokens.

    Time 0 is the first step. Requests without a recorded arrival or without output tokens are left out.
    """
    times = sequence_times(recording)
    for arrival in sorted(recording.arrivals, key=lambda arrival: arrival.time):
        keys = [(arrival.request_id, index) for index in range(arrival.num_sequences)]
        outputs = tuple(times[key].num_output_tokens for key in keys if key in times)
        if outputs:
            time = arrival.time - recording.steps[0].start_time
            yield SimulatedRequest(arrival.request_id, time, arrival.prompt_token_ids, outputs, arrival.priority)
