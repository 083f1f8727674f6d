"""The methods compared: every rung of the ladder, on the same weights, with the same signature."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self, Unpack

import torch
from transformers import PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.execution.hf.load import ModelSource, load_model
from inflight.lessons import engine_batching, padded_batching, ragged_batching, static_batching
from inflight.lessons.run import LessonRequest, Options, Run


class Method(Protocol):
    """Runs requests greedily to their ends; the options are those of `Run`."""

    def __call__(self, requests: Sequence[LessonRequest], **options: Unpack[Options]) -> Run: ...


class Setting:
    """A plain model for the rungs, and an engine on a copy that shares its weights.

    Args:
        source: hub id, folder, or a loaded model.
        config: the engine's; its `max_num_seqs` is the number of slots of all rungs. Speculation is off, so that steps
            can be compared.
    """

    def __init__(self, source: ModelSource, config: EngineConfig) -> None:
        self.model = load_model(source, config)
        self.engine = Engine(self.model, config.replace(speculation="off", draft_model=None))
        self.num_slots = config.scheduling.max_num_seqs

    @property
    def methods(self) -> dict[str, Method]:
        """The rungs by name, in order."""
        return {
            "static": partial(static_batching.run, self.model, num_slots=self.num_slots),
            "padded": partial(padded_batching.run, self.model, num_slots=self.num_slots),
            "ragged": partial(ragged_batching.run, self.model, num_slots=self.num_slots),
            "engine": partial(engine_batching.run, self.engine),
        }


def warm_up(methods: Mapping[str, Method], requests: Sequence[LessonRequest]) -> None:
    """Run two short requests through each method, so that the setup of a first forward pass is not measured. Their
    prompts are reversed: the engine's prefix cache must not find them again."""
    for run in methods.values():
        run([LessonRequest(request.prompt_token_ids[::-1], 2) for request in requests[:2]])


SPARE = 1.5
"""A safety factor of measured times."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The reference's time of a step of all slots, and of a prompt token, in seconds."""

    step: float
    prompt_token: float

    @classmethod
    def measure(cls, model: PreTrainedModel, num_slots: int, num_prompt_tokens: int) -> Self:
        """Measure it, with prompts of `num_prompt_tokens` tokens."""
        prompt = _seconds_of(model, 1, num_prompt_tokens)
        return cls(SPARE * _seconds_of(model, num_slots, 1), SPARE * prompt / num_prompt_tokens)

    def seconds(self, requests: Sequence[LessonRequest], num_slots: int) -> float:
        """Estimate a method's time for these requests: between waves, which run for their longest request, and always
        full slots."""
        lengths = [request.max_new_tokens for request in requests]
        in_waves = sum(max(lengths[first : first + num_slots]) for first in range(0, len(lengths), num_slots))
        num_steps = (in_waves + max(max(lengths), sum(lengths) / num_slots)) / 2
        return num_steps * self.step + self.prompt_token * sum(len(each.prompt_token_ids) for each in requests)


@torch.inference_mode()
def _seconds_of(model: PreTrainedModel, num_rows: int, num_tokens: int) -> float:
    """The seconds of a forward pass, the better of two."""
    tokens = torch.zeros(num_rows, num_tokens, dtype=torch.int64, device=model.device)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        model(input_ids=tokens, use_cache=False)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
