"""Kernels are built once and kept on disk, and everything works without them."""

import io
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from inflight.execution import kernels as native
from inflight.execution.attention import AttentionSpec
from inflight.execution.attention.cpu_backend import CpuAttention
from tests.execution.fuzz_operators import Fuzzer

COMMAND = [sys.executable, "-m", "inflight", "generate", "Once upon a time", "--max-tokens", "12", "--temperature", "0"]


def generate(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--dtype", "float32"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})


def test_without_a_compiler_everything_works_after_one_warning(tmp_path: Path) -> None:
    expected = generate()
    without = generate(CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert without.stdout == expected.stdout
    assert without.stderr.count("no CPU kernels of our own") == 1
    assert "there is no C++ compiler 'no-such-compiler' here" in without.stderr
    assert expected.stderr == ""


def test_a_built_library_is_found_again() -> None:
    assert native.kernels_available()
    library = native.cache_folder() / f"kernels-{native._digest()}.so"
    assert library.exists()
    assert native._built_library() == library


class Terminal(io.StringIO):
    """Written to as a terminal; says when the seconds have run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.has_moved = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.getvalue().count("\r") >= 2:
            self.has_moved.set()
        return written


def test_the_seconds_of_a_build_run_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with native._timed("building …", interval=0.001):
        assert terminal.has_moved.wait(60)
    assert re.fullmatch(r"building …(\rbuilding … \d+ s){3,}\n", terminal.getvalue())
    monkeypatch.setattr(sys, "stderr", pipe)
    with native._timed("building …", interval=0.001):
        pass
    with pytest.raises(OSError, match="no"), native._timed("building …"):
        raise OSError("no")
    assert re.fullmatch(r"building … \d+ s\nbuilding … failed\n", pipe.getvalue())


def test_a_library_in_a_folder_that_cannot_be_written_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inflight").mkdir()
    library = tmp_path / "inflight" / f"kernels-{native._digest()}.so"
    library.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path / "elsewhere")
    monkeypatch.setattr(native, "_build", lambda _: pytest.fail("it is there"))
    assert native._built_library() == library


def test_without_a_cache_folder_that_can_be_looked_into_a_temporary_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build(library: Path) -> None:
        library.touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("long" * 100)))  # for root, too, the system refuses this name
    monkeypatch.setattr(native, "cache_folder", native.cache_folder.__wrapped__)
    monkeypatch.setattr(native, "_build", build)
    library = native._built_library()
    assert library.exists()
    assert "XDG_CACHE_HOME names another folder" in caplog.text
    shutil.rmtree(library.parent)


def test_another_cpu_gets_another_library() -> None:
    before = native._digest()
    original = native._instruction_sets
    try:
        native._instruction_sets = lambda: original() + " avx1024"
        assert native._digest() != before
    finally:
        native._instruction_sets = original


@pytest.mark.skipif("avx512f" not in native._instruction_sets().split(), reason="others are tested as they are")
def test_a_cpu_without_avx512_gets_correct_kernels() -> None:
    """Registers are half as wide and layouts differ; the tests of attention, layers and the sampler still pass."""
    names = (
        "attention",
        "experts",
        "grouped",
        "linears",
        "sampler",
        "sampler_filters",
        "sampler_distribution",
        "sampler_counters",
    )
    tests = [f"tests/execution/test_{name}.py" for name in names]
    not_ours = "not [torch and not reference_is_the_definition and not sliced"  # the same on any CPU
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", not_ours]
    of_that_cpu = {
        "INFLIGHT_TARGET_CPU": "haswell",  # our kernels
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "PYTEST_ADDOPTS": "",
    }
    environment = {**os.environ, **of_that_cpu}
    done = subprocess.run(
        [*command, *tests], capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_matrix_unit_that_linux_denies_is_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_instruction_sets", lambda: "flags : avx2 amx_tile amx_int8")
    monkeypatch.setattr(native, "_may_use_matrix_unit", lambda: False)
    assert "-mno-amx-tile" in native._native_flags()
    monkeypatch.setattr(native, "_may_use_matrix_unit", lambda: True)
    assert "-mno-amx-tile" not in native._native_flags()


def test_operators_refuse_arguments_that_do_not_fit() -> None:
    """`make soak` makes many more such calls under AddressSanitizer."""
    assert native.kernels_available()
    fuzzer = Fuzzer(seed=0)
    fuzzer.run(100)
    assert fuzzer.refused.total() > 300
    assert fuzzer.accepted.total() > 300
    assert fuzzer.accepted.keys() >= fuzzer.refused.keys(), "an operator that refuses everything is not tried at all"


def test_an_attention_call_keeps_its_step_to_its_memory() -> None:
    operators = torch.ops.inflight
    backend = CpuAttention(torch.float32, block_size=4)
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_size=8, value_head_size=8, scale=1.0)
    cache = backend.allocate(3, spec)
    lengths = [torch.tensor([6]), torch.tensor([6])]
    indices, states = torch.arange(6), torch.zeros(6, 1, 8)

    def begin(tables: list[list[int]], **changes: torch.Tensor) -> None:
        given = {"indices": indices, "block_size": 4} | changes
        table = torch.tensor(tables, dtype=torch.int32)
        operators.begin_step(backend._step, given["block_size"], *lengths, [given["indices"]], [table])

    begin([[0, 1]])
    operators.write(states, states, cache.call)
    assert operators.attend(torch.zeros(6, 2, 8), None, cache.call, 8).shape == (6, 2, 8)
    with pytest.raises(RuntimeError, match="a block table is shorter than its sequence"):
        begin([[0]])
    for tables, changes in (([[0, 4]], {}), ([[0, 1]], {"indices": indices + 20})):
        begin(tables, **changes)
        with pytest.raises(RuntimeError, match="the step names blocks beyond the 4 of the cache"):
            operators.write(states, states, cache.call)
    begin([[-1, 1]])
    with pytest.raises(RuntimeError, match="a block that a query sees was let go"):
        operators.attend(torch.zeros(6, 2, 8), None, cache.call, 8)
    begin([[0, 1]])
    with pytest.raises(RuntimeError, match="the step has 6 tokens, and there are 5 queries"):
        operators.attend(torch.zeros(5, 2, 8), None, cache.call, 8)
    with pytest.raises(RuntimeError, match="queries has size 9 in dimension 2, not 8"):
        operators.attend(torch.zeros(6, 2, 9), None, cache.call, 8)
