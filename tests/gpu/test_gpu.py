"""The exactness cases on a CUDA device, and the promise of one transfer to the host per step. Skipped without a
device."""

import copy
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from inflight import LLM, SamplingParams
from inflight.contracts.api.config import EngineConfig
from inflight.engine.engine import Engine
from tests import zoo
from tests.exactness.harness import (
    Reference,
    assert_exact,
    has_windows,
    make_references,
    num_blocks_for,
    run_teacher_forced,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def full_float32() -> Iterator[None]:
    """Use full float32: no TensorFloat-32 in matrix products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@cache
def on_gpu(name: str) -> tuple[PreTrainedModel, list[Reference]]:
    model = copy.deepcopy(zoo.build(name)).to("cuda")
    return model, make_references(name, model)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
@pytest.mark.parametrize(("budget", "block_size"), [(8, 1), (64, 16), (2048, 32)])
def test_exact_in_a_tight_cache(name: str, budget: int, block_size: int) -> None:
    model, lessons = on_gpu(name)
    run = run_teacher_forced(
        model,
        lessons,
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_blocks=num_blocks_for(name, 160, block_size=block_size, budget=budget),
        max_num_seqs=12,
    )
    assert_exact(run)
    assert run.num_preemptions > 0 or (budget == 2048 and has_windows(name))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_generate_in_bfloat16_runs_to_the_end(name: str) -> None:
    llm = LLM(copy.deepcopy(zoo.build(name)), device="cuda", dtype="bfloat16")
    outputs = llm.generate([[1, 2, 3], [4] * 50], SamplingParams(seed=1, max_tokens=20), use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 20]


def test_each_step_makes_one_transfer_to_the_host() -> None:
    """CUDA reports every operation that makes the host wait; only the sampler's list of tokens may do so."""
    engine = Engine(on_gpu("llama")[0], EngineConfig(max_num_batched_tokens=32))
    forward = engine.runner.executor.forward
    num_reads = 0
    tolist = torch.Tensor.tolist

    def watched_forward(*args: object) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        return forward(*args)  # type: ignore[arg-type]

    def watched_tolist(tensor: torch.Tensor) -> list[int]:
        nonlocal num_reads
        torch.cuda.set_sync_debug_mode("default")
        num_reads += 1
        return tolist(tensor)  # type: ignore[no-any-return]

    engine.runner.executor.forward = watched_forward  # type: ignore[method-assign]
    for number in range(6):
        params = SamplingParams(temperature=float(number % 2), top_k=5, top_p=0.9, seed=number, max_tokens=6)
        engine.submit(engine.inputs.accept(str(number), list(range(1, 10 + 5 * number)), params))
    num_steps = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", watched_tolist)
        while engine.has_unfinished_requests:
            num_steps += bool(engine.step())
    torch.cuda.set_sync_debug_mode("default")
    assert num_reads == num_steps > 0
