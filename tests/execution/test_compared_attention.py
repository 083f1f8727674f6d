"""The comparison does not change a run, and distinguishes correct backends from broken ones."""

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.plan import Span, StepPlan
from inflight.engine.engine import Engine
from inflight.execution.attention import AttentionBackend, AttentionSpec, ReferenceAttention, TorchAttention
from inflight.execution.attention.compared import ComparedAttention
from inflight.execution.attention.interface import KVStorage
from inflight.execution.executors import PackedExecutor
from inflight.execution.ragged_batch import RaggedBatch
from tests import zoo

CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3], list(range(40)), list(range(60, 85))]
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, value_head_size=8, scale=0.3)


def run(
    engine: Engine, comparison: ComparedAttention, num_tokens: int = 8
) -> tuple[list[list[int]], list[list[float]]]:
    """The tokens of all prompts, and the differences in each step."""
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    differences = []
    for number, prompt in enumerate(PROMPTS):
        engine.submit(engine.inputs.accept(str(number), prompt, SamplingParams(temperature=0, max_tokens=num_tokens)))
    while engine.has_unfinished_requests:
        for output in engine.step():
            tokens[int(output.request_id)] += output.new_token_ids
        differences.append([call.difference for call in comparison.calls])
    return tokens, differences


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss", "deepseek_v3"])
@pytest.mark.thorough("llama", "gemma2")
def test_a_compared_engine_gives_the_same_tokens_and_agrees_with_the_definition(name: str) -> None:
    model = zoo.build(name)
    engine = Engine(model, EngineConfig(max_num_batched_tokens=16, max_num_seqs=3))
    comparison = engine.runner.compare_attention()
    assert comparison.name == "cpu"
    comparison.comparing = True
    tokens, differences = run(engine, comparison)
    assert tokens == [zoo.plain_greedy(model, prompt, 8) for prompt in PROMPTS]
    assert all(len(step) == model.config.num_hidden_layers for step in differences)
    assert max(max(step) for step in differences) < 1e-5


def test_tokens_of_steps_that_were_not_compared_are_stored_all_the_same() -> None:
    engine = Engine(zoo.build("llama"), EngineConfig(max_num_batched_tokens=16))
    comparison = engine.runner.compare_attention()
    for number, prompt in enumerate(PROMPTS):
        engine.submit(engine.inputs.accept(str(number), prompt, SamplingParams(temperature=0, max_tokens=4)))
    for _ in range(3):
        engine.step()
        assert comparison.calls == []
    comparison.comparing = True
    engine.step()
    assert 0 <= max(call.difference for call in comparison.calls) < 1e-5


class KeysOfTheNextToken(TorchAttention):
    def write(self, cache: KVStorage, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec) -> None:
        super().write(cache, key.roll(1, dims=0), value, spec)


class ForgetsTheFirstKey(TorchAttention):
    def attend(self, query: torch.Tensor, cache: KVStorage, spec: AttentionSpec, *rest: Any) -> torch.Tensor:
        slots = self.batch.groups[spec.cache_group].block_tables_host[:, 0].astype(int) * self.block_size
        cache.values.flatten(0, 1)[torch.from_numpy(slots)] = 0
        return super().attend(query, cache, spec, *rest)


class SaysNothing(TorchAttention):
    def attend(self, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.full_like(query, float("nan"))


class CopiesNothing(TorchAttention):
    def copy_blocks(self, cache: KVStorage, copies: Sequence[tuple[int, int]]) -> None:
        pass


@pytest.mark.parametrize("broken", [KeysOfTheNextToken, ForgetsTheFirstKey])
def test_a_broken_backend_is_detected_in_the_first_call(broken: type[TorchAttention]) -> None:
    engine = Engine(zoo.build("llama"), EngineConfig(max_num_batched_tokens=16))
    assert isinstance(engine.runner.executor, PackedExecutor)
    engine.runner.executor.backend = broken(CPU, torch.float32, engine.config.kv_cache.block_size)
    comparison = engine.runner.compare_attention()
    comparison.comparing = True
    _, differences = run(engine, comparison, num_tokens=2)
    assert min(step[0] for step in differences) > 1e-2


def differences_of(backend: AttentionBackend, copies: Sequence[tuple[int, int]]) -> float:
    """Write a sequence of 6 tokens into blocks 0 and 1, copy blocks, and attend from blocks 2 and 3."""
    comparison = ComparedAttention(backend, ReferenceAttention(CPU, torch.float32, 4))
    comparison.comparing = True
    cache = comparison.allocate(4, SPEC)
    cache.keys.zero_()  # new memory may hold data of the last test
    cache.values.zero_()
    generator = torch.Generator().manual_seed(0)
    for start, length, table in ((0, 5, [0, 1]), (5, 1, [2, 3])):
        span = Span(0, 0, start, [0] * length, 1, start + length)
        comparison.begin_step(RaggedBatch.from_plan(StepPlan((span,), ((array("i", table),),)), 4, CPU))
        if start:
            comparison.copy_blocks(cache, copies)
        query, key, value = (torch.randn(length, heads, 8, generator=generator) for heads in (4, 2, 2))
        comparison.write(cache, key, value, SPEC)
        comparison.attend(query, cache, SPEC, None)
    return comparison.calls[0].difference


def test_block_copies_go_to_both_caches() -> None:
    copies = [(0, 2), (1, 3)]
    assert differences_of(TorchAttention(CPU, torch.float32, 4), copies) < 1e-5
    assert differences_of(CopiesNothing(CPU, torch.float32, 4), copies) > 1e-2


def test_nan_differs_infinitely() -> None:
    assert differences_of(SaysNothing(CPU, torch.float32, 4), [(0, 2), (1, 3)]) == float("inf")
