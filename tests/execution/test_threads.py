"""Threads that compute: how many there are, and that work done by several is done once, with the same bits."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
import torch

from inflight import LLM, SamplingParams
from inflight.contracts.api.config import EngineConfig
from inflight.execution.grouped.weight import GroupedLayout
from inflight.execution.threads import ComputeThreads

ROWS = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))


def activated(rows: torch.Tensor = ROWS) -> torch.Tensor:
    return torch.ops.inflight.activate(rows.repeat(40, 1), "gelu", "none")


@contextmanager
def torch_threads(number: int, *, are_own: bool = False) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    torch.ops.inflight.use_own_threads(number if are_own else 0)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.ops.inflight.use_own_threads(0)


# ------------------------------------------------------------------------------------------------- how many


def test_torch_may_have_fewer() -> None:
    with torch_threads(1):
        assert ComputeThreads(None).number == 1


def test_a_caller_may_ask_for_any_number() -> None:
    with torch_threads(1):
        llm = LLM(dtype="float32", num_threads=3)
        assert llm.model_info.num_threads == torch.get_num_threads() == 3
        torch.set_num_threads(2)
        numbers: list[int] = []
        llm.engine.observer = lambda record: numbers.append(torch.get_num_threads())
        llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
        assert numbers == [3, 3]
        assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="num_threads is 0"):
        EngineConfig(num_threads=0)


# ------------------------------------------------------------------------------------------------- what they do


@pytest.mark.parametrize("are_own", [False, True])
def test_any_number_of_threads_gives_the_same_bits(are_own: bool) -> None:
    with torch_threads(1):
        expected = activated()
    for number in chain((2, 3, 7, 2, 5, 1, 4), range(1, 9)):
        with torch_threads(number, are_own=are_own):
            for _ in range(20):
                assert torch.equal(activated(), expected)


def workers() -> set[str]:
    tasks = Path("/proc/self/task").iterdir()
    return {task.name for task in tasks if (task / "comm").read_text() == "inflight\n"}


def test_threads_stay_however_little_there_is_to_do() -> None:
    with torch_threads(5, are_own=True):
        activated()
        while len(before := workers()) < 4:  # a thread takes its name when it first has a core, of which nothing tells
            time.sleep(0.01)
        assert len(before) == 4
        for count in (1, 2, 3, 64):
            for _ in range(20):
                torch.ops.inflight.activate(ROWS[:count].repeat(32, 1), "gelu", "none")
        assert workers() == before


def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    inputs = [ROWS + number for number in range(4)]
    expected = [activated(rows) for rows in inputs]

    def compute(number: int) -> bool:
        with torch_threads(2 + number % 2, are_own=True):
            return all(torch.equal(activated(inputs[number]), expected[number]) for _ in range(50))

    with torch_threads(2), ThreadPoolExecutor(4) as executor:
        assert all(executor.map(compute, range(4)))


@pytest.mark.parametrize("are_own", [False, True])
def test_an_error_in_one_thread_reaches_the_caller(are_own: bool) -> None:
    layout = GroupedLayout(bits=4, coarse=32, middle=8).words
    with torch_threads(2, are_own=are_own):
        for _ in range(20):
            with pytest.raises(RuntimeError, match="weights cannot be"):
                torch.ops.inflight.round_grouped(layout, torch.zeros(512, 64, dtype=torch.int64))
            activated()


FORKED = """
import os, torch
from inflight.execution.kernels import kernels_available
assert kernels_available()
torch.ops.inflight.use_own_threads(3)
rows = torch.randn(2000, 500, generator=torch.Generator().manual_seed(1))
expected = torch.ops.inflight.activate(rows, "gelu", "none")
child = os.fork()
same = all(torch.equal(torch.ops.inflight.activate(rows, "gelu", "none"), expected) for _ in range(5))
if child == 0:
    torch.ops.inflight.use_own_threads(2)
    same = same and torch.equal(torch.ops.inflight.activate(rows, "gelu", "none"), expected)
    os._exit(0 if same else 1)
assert same and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.thorough
def test_a_forked_process_computes_without_the_threads_that_it_does_not_have() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True)


WITHOUT_TORCH = """
import os, torch
from pathlib import Path
from inflight import LLM, SamplingParams

def seconds_of_others():
    own = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() != "inflight\\n"]
    (session,) = llm._client.sessions().values()
    python = os.getpid(), session.connection.thread.native_id
    return sum(int((task / "schedstat").read_text().split()[0]) for task in own if int(task.name) not in python) / 1e9

torch.set_num_threads(2)
llm = LLM(dtype="float32", num_threads=2)
assert llm.model_info.is_recorded
params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
llm.generate(["Once"] * 8, params, use_tqdm=False)
before, start = seconds_of_others(), os.times().user
llm.generate(["Once"] * 8, params, use_tqdm=False)
others, all_threads = seconds_of_others() - before, os.times().user - start
assert others < 0.1 * all_threads, (others, all_threads)
"""


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count threads' time")
@pytest.mark.thorough
def test_torchs_threads_have_no_part_in_a_recorded_step() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True)
