"""Models that are prepared and run at the same time do not affect each other, even if they share objects."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from inflight import LLM
from inflight.execution.attention import AttentionSpec, TorchAttention
from inflight.execution.attention.interface import KVStorage
from inflight.execution.preparation.report import PreparationReport
from inflight.execution.ragged_batch import RaggedBatch
from tests import zoo
from tests.execution.packed_steps import BLOCK_SIZE, CHUNK, assert_packed_is_plain, packed_executor, packed_logits
from tests.execution.prepared_models import report_of


def in_threads(*works: Callable[[threading.Barrier], Any]) -> list[Any]:
    """The results of functions that run at the same time; each gets a barrier for synchronisation."""
    barrier = threading.Barrier(len(works), timeout=600)
    results: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            results[number] = works[number](barrier)
        except BaseException as error:
            barrier.abort()
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return results


def prepare_at_the_same_time(models: list[PreTrainedModel]) -> None:
    def work(model: PreTrainedModel, barrier: threading.Barrier) -> list[PreparationReport]:
        reports = []
        for _ in range(5):
            barrier.wait()
            reports.append(report_of(model))
        return reports

    expected = [report_of(model).specs for model in models]
    results = in_threads(*(partial(work, model) for model in models))
    for model, specs, reports in zip(models, expected, results, strict=True):
        assert all(report.specs == specs for report in reports)
        assert model.config._attn_implementation == "eager"


def test_two_models_prepared_at_the_same_time_do_not_disturb_each_other() -> None:
    prepare_at_the_same_time([zoo.draw(name, zoo.FACTORS[name], seed=0) for name in ("gpt_oss", "gemma2")])


def test_one_model_prepared_twice_at_the_same_time_is_accepted_twice() -> None:
    prepare_at_the_same_time([zoo.draw("llama", zoo.FACTORS["llama"], seed=0)] * 2)


def test_two_models_run_at_the_same_time_do_not_disturb_each_other() -> None:
    """Every step of one model begins together with a step of the other; each gives its own logits."""
    models = [zoo.draw("llama", zoo.FACTORS["llama"], seed) for seed in range(2)]
    prompts = [zoo.sample_sequences(seed) for seed in range(2)]
    executors = [packed_executor(model) for model in models]

    def work(number: int, barrier: threading.Barrier) -> list[list[Tensor]]:
        return [packed_logits(executors[number], prompts[number], barrier.wait) for _ in range(5)]

    results = in_threads(*(partial(work, number) for number in range(2)))
    for model, own_prompts, rounds in zip(models, prompts, results, strict=True):
        assert model.config._attn_implementation == "eager"
        for packed in rounds:
            assert_packed_is_plain(model, packed, own_prompts)


class Interrupted(TorchAttention):
    """Calls a function in the middle of every step, when the model's first layer attends."""

    def __init__(self, interrupt: Callable[[], object]) -> None:
        super().__init__(torch.device("cpu"), torch.float32, BLOCK_SIZE)
        self.interrupt = interrupt
        self.is_first = True

    def begin_step(self, batch: RaggedBatch) -> None:
        super().begin_step(batch)
        self.is_first = True

    def attend(self, query: Tensor, cache: KVStorage, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        if self.is_first:
            self.is_first = False
            self.interrupt()
        return super().attend(query, cache, spec, sinks)


def assert_overlapping_steps_are_right(first: PreTrainedModel, second: PreTrainedModel) -> None:
    """A step of the first executor ends while a step of the second runs, unless the second waits for its turn."""
    first_runs, second_runs, first_is_done = threading.Event(), threading.Event(), threading.Event()

    def in_first() -> None:
        first_runs.set()
        second_runs.wait(timeout=0.3)  # times out if it correctly waits for us

    def in_second() -> None:
        second_runs.set()
        first_is_done.wait(timeout=60)

    prompt = zoo.sample_sequences()[0][:CHUNK]
    executors = packed_executor(first, Interrupted(in_first)), packed_executor(second, Interrupted(in_second))

    def run_first(_: threading.Barrier) -> list[Tensor]:
        try:
            return packed_logits(executors[0], [prompt])
        finally:
            first_is_done.set()

    def run_second(_: threading.Barrier) -> list[Tensor]:
        first_runs.wait(timeout=60)
        return packed_logits(executors[1], [prompt])

    for model, packed in zip((first, second), in_threads(run_first, run_second), strict=True):
        assert_packed_is_plain(model, packed, [prompt])
        assert model.config._attn_implementation == "eager"


def test_two_executors_of_one_model_do_not_disturb_each_other() -> None:
    model = zoo.draw("llama", zoo.FACTORS["llama"], seed=0)
    assert_overlapping_steps_are_right(model, model)


def test_two_models_made_from_one_config_object_do_not_disturb_each_other() -> None:
    """`LlamaForCausalLM(config)` keeps the caller's config, so two such models share it."""
    first, second = (zoo.draw("llama", zoo.FACTORS["llama"], seed) for seed in range(2))
    for module in second.modules():
        if hasattr(module, "config"):
            module.config = first.config
    assert_overlapping_steps_are_right(first, second)


@pytest.mark.thorough
def test_models_loaded_at_the_same_time_do_not_change_the_default_dtype() -> None:
    """`transformers` changes the default dtype for all threads while it builds a model: the checkpoint and its float32
    proxy."""

    def load(barrier: threading.Barrier) -> None:
        barrier.wait()
        for _ in range(3):
            LLM(dtype="bfloat16", num_blocks=8)

    in_threads(*[load] * 4)
    assert torch.get_default_dtype() == torch.float32
