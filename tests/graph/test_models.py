"""Models run as graphs by default, with the bits of the model that runs eagerly."""

import copy
import gc
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from inflight import LLM, SamplingParams
from inflight.execution.executors import packed
from inflight.execution.graph import trace
from inflight.execution.graph.encode import CompiledGraph, EncodedProgram
from inflight.execution.kernels import kernels_available
from tests import zoo
from tests.execution import this_cpu
from tests.invariance.test_invariance import PRECISIONS, assert_same_bits, needs, run

pytestmark = pytest.mark.skipif(not kernels_available(), reason="needs a C++ compiler")

IN_PYTHON = {"phi3_longrope"}
"""Embeddings that depend on how long each sequence is."""


def bits(name: str, **options: Any) -> tuple[dict[int, Tensor], bool]:
    logits, engine = run(name, num_requests=12, max_num_seqs=5, max_num_batched_tokens=33, **options)
    return logits, engine.runner.info.is_recorded


@pytest.mark.parametrize("name", sorted(zoo.ARCHITECTURES))
@pytest.mark.thorough("gemma", "llama", "qwen3_moe")
def test_every_architecture_has_the_bits_of_its_own_python(name: str) -> None:
    this_cpu.needs(torch.float32)
    graph, is_recorded = bits(name, dtype="float32")
    eager, is_eager_recorded = bits(name, dtype="float32", record_forward=False)
    assert (is_recorded, is_eager_recorded) == (name not in IN_PYTHON, False)
    assert_same_bits(graph, eager)


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "float32"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3_moe"])
@pytest.mark.thorough("llama", "qwen3_moe-int4]")
def test_every_precision_has_the_bits_of_its_own_python(name: str, precision: str) -> None:
    needs(precision)
    options = PRECISIONS[precision]
    graph, is_recorded = bits(name, **options)
    eager, _ = bits(name, **options, record_forward=False)
    assert is_recorded
    assert_same_bits(graph, eager)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe"])
def test_a_model_with_a_single_head_of_keys_runs_as_a_graph(name: str) -> None:
    """Of a dimension with one element, torch gives other strides without data than with it."""
    config = copy.deepcopy(zoo.build(name).config)
    config.num_key_value_heads = 1
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    graph, eager = LLM(model), LLM(model, record_forward=False)
    assert (graph.model_info.is_recorded, graph.model_info.notes) == (True, ())
    ours, theirs = (llm.generate([[1, 2, 3, 4], [5]], sampling, use_tqdm=False) for llm in (graph, eager))
    assert [each.outputs for each in ours] == [each.outputs for each in theirs]


def test_a_model_with_hooks_runs_eagerly() -> None:
    model = copy.deepcopy(zoo.build("llama"))
    seen: list[int] = []
    model.model.layers[0].register_forward_hook(lambda *args: seen.append(1))
    llm = LLM(model, speculation="off")
    assert not llm.model_info.is_recorded
    assert any("there are hooks on its modules" in note for note in llm.model_info.notes)
    seen.clear()
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("num_wrong", "reason"),
    [(1, None), (2, "the recorded forward pass gives other bits")],
)
def test_a_graph_that_is_wrong_does_not_run(
    monkeypatch: pytest.MonkeyPatch, num_wrong: int, reason: str | None
) -> None:
    """Fusion is given up first, then the graph."""

    class Wrong(CompiledGraph):
        made: ClassVar[list[EncodedProgram]] = []

        def __init__(self, program: EncodedProgram) -> None:
            super().__init__(program)
            self.is_wrong = len(self.made) < num_wrong
            self.made.append(program)

        def __call__(self, *rows: Tensor) -> list[Tensor]:
            return [each + self.is_wrong for each in super().__call__(*rows)]

    monkeypatch.setattr(packed, "CompiledGraph", Wrong)
    info = LLM(zoo.build("llama")).model_info
    assert info.is_recorded == (reason is None)
    assert info.notes == (() if reason is None else (f"every step runs in Python: {reason}",))


def test_a_graph_that_fails_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("a view would leave its memory")

    monkeypatch.setattr(packed, "CompiledGraph", fail)
    info = LLM(zoo.build("llama")).model_info
    assert info.notes == ("every step runs in Python: the recorded forward pass fails: a view would leave its memory",)


def test_what_is_deleted_meanwhile_is_no_part_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with data nor without. An engine's layers, caches and program are deleted by operators, too."""
    gone: list[bool] = []

    def beside_garbage(run: Any) -> Any:
        def trace_beside_garbage(forward: Any, *sizes: int) -> Any:
            def beside(*rows: Tensor) -> Tensor:
                llms.pop()
                gc.collect()
                gone.append(True)
                return forward(*rows)

            return run(beside, *sizes)

        return trace_beside_garbage

    llms = [LLM(zoo.build("qwen3_moe")) for _ in range(len(trace.SAMPLES) + 1)]
    monkeypatch.setattr(trace, "_trace", beside_garbage(trace._trace))
    info = LLM(zoo.build("llama")).model_info
    assert info.notes == ()
    assert len(gone) == len(trace.SAMPLES) + 1


def test_a_cache_of_a_few_tokens_is_enough_to_prove_it() -> None:
    llm = LLM(zoo.build("llama"), num_blocks=1, block_size=4, max_model_len=4, max_num_batched_tokens=4)
    assert llm.model_info.is_recorded
    assert llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1))[0].outputs[0].token_ids
