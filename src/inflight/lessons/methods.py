"""The methods that are compared: every rung of the ladder, on the same weights, with the same signature."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, Unpack

from inflight.contracts.config import EngineConfig
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
        config: the engine's; its `max_num_seqs` is the number of slots of all rungs. Nothing is guessed, so that steps
            can be compared.
    """

    def __init__(self, source: ModelSource, config: EngineConfig) -> None:
        self.model = load_model(source, config)
        self.engine = Engine(self.model, replace(config, speculation="off", draft_model=None))
        self.num_slots = config.max_num_seqs

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
