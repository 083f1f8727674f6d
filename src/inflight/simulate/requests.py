"""What comes in: requests made up by distributions, or those of a recording. One at a time, never all at once.

Decides arrival times, lengths and which prompts share a prefix; knows no scheduler. Tokens mean nothing here: they are
only equal or different.
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
"""So many requests' lengths and times are drawn at once."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request.

    Attributes:
        arrival: seconds; a negative one waits already when the run begins.
        num_output_tokens: of each of its sequences.
    """

    request_id: str
    arrival: float
    prompt_token_ids: Sequence[int]
    num_output_tokens: tuple[int, ...]
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long something is, in tokens: never less than 1.

    Attributes:
        shape: "fixed" (`first`), "uniform" (from `first` to `second`), "exponential" (of mean `first`), or "lognormal"
            (of mean `first`; `second` is the standard deviation of the logarithm: 1 is heavy-tailed).
    """

    shape: Shape
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """From "100" or "fixed:100", "uniform:16:256", "exponential:100", "lognormal:100:1". Raises `ValueError`."""
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
        """So many random lengths; longer ones than `at_most` are cut."""
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
    """Requests that are made up; iterating makes the same ones again.

    Attributes:
        rate: requests a second, on average, each independent of the others (Poisson); None: all come at time 0.
        prompt_tokens, output_tokens: a prompt's length is without the shared prefix.
        shared_prefix_tokens: so many tokens stand before the prompts of `shared_prefix_share` of all requests.
        num_prefixes: there are so many such prefixes, equally frequent.
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
    """The requests of a recording: they come as they came, and get as many tokens as they got.

    The first step is time 0. Those whose arrival was not recorded, or that got nothing, are left out.
    """
    times = sequence_times(recording)
    for arrival in sorted(recording.arrivals, key=lambda arrival: arrival.time):
        keys = [(arrival.request_id, index) for index in range(arrival.num_sequences)]
        outputs = tuple(times[key].num_output_tokens for key in keys if key in times)
        if outputs:
            time = arrival.time - recording.steps[0].start_time
            yield SimulatedRequest(arrival.request_id, time, arrival.prompt_token_ids, outputs, arrival.priority)
