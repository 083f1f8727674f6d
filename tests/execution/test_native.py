"""Kernels come with the package, or are built once and kept on disk; and everything works without them."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from inflight.execution.attention import AttentionSpec
from inflight.execution.attention.cpu_backend import CpuAttention
from inflight.execution.kernels import kernels_available, kernels_in_use
from inflight.execution.kernels import library as native
from inflight.execution.kernels.building import TARGETS, carried_kernels_name
from tests.execution.fuzz_operators import Fuzzer

ROOT = Path(__file__).parents[2]
AVX2 = "avx2 bmi1 bmi2 f16c fma movbe"
AVX512 = "avx512f avx512bw avx512cd avx512dq avx512vl"
AMX = "avx512_vnni avx512_bf16 avx512vbmi amx_tile amx_bf16 amx_int8"
needs_avx2 = pytest.mark.skipif("avx2" not in native.instruction_sets().split(), reason="for CPUs with AVX2")

COMMAND = [sys.executable, "-m", "inflight", "generate", "Once upon a time", "--max-tokens", "12", "--temperature", "0"]


def generate(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--dtype", "float32"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})


@pytest.mark.thorough
def test_without_a_compiler_everything_works_after_one_warning(tmp_path: Path) -> None:
    expected = generate()
    without = generate(CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert without.stdout == expected.stdout
    assert without.stderr.count("the CPU kernels are not available") == 1
    assert "there is no C++ compiler 'no-such-compiler' here" in without.stderr
    assert expected.stderr == ""


def test_a_built_library_is_found_again() -> None:
    assert kernels_in_use() == "native"
    built = native.built_libraries(dict.fromkeys((native.kernels_name(), native.bridge_name()), _no_build))
    assert [path.parent for path in built] == [native.cache_folder()] * 2
    assert all(path.exists() for path in built)


def _no_build(_: Path) -> None:
    pytest.fail("it is there")


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
    library = tmp_path / "inflight" / native.kernels_name()
    library.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "cache_folder", lambda: tmp_path / "elsewhere")
    assert native.built_libraries({library.name: _no_build}) == [library]


def test_without_a_cache_folder_that_can_be_looked_into_a_temporary_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("long" * 100)))  # for root, too, the system refuses this name
    monkeypatch.setattr(native, "cache_folder", native.cache_folder.__wrapped__)
    [library] = native.built_libraries({"kernels.so": Path.touch})
    assert library.exists()
    assert "set XDG_CACHE_HOME to another folder" in caplog.text
    shutil.rmtree(library.parent)


def test_another_cpu_gets_other_kernels_and_another_torch_another_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, bridge = native.kernels_name(), native.bridge_name()
    original = native.instruction_sets
    with monkeypatch.context() as patch:
        patch.setattr(native, "instruction_sets", lambda: original() + " avx1024")
        assert (native.kernels_name() != kernels, native.bridge_name() != bridge) == (True, False)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert (native.kernels_name() != kernels, native.bridge_name() != bridge) == (False, True)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as a wheel installs it, with kernels for CPUs that have AVX2 and no more."""
    folder = tmp_path_factory.mktemp("wheel")
    asked = {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true", "INFLIGHT_TARGET_CPU": "avx2"}
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, env={**os.environ, **asked})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [wheel] = folder.glob("*.whl")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder / "site")
        [metadata] = [name for name in files.namelist() if name.endswith("/METADATA")]
        assert "torch==" not in files.read(metadata).decode()
    return folder / "site"


@needs_avx2
@pytest.mark.thorough
def test_a_wheel_with_kernels_needs_no_compiler_and_builds_nothing(package: Path, tmp_path: Path) -> None:
    expected = generate()
    without = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(package)}
    carried = generate(**without)
    assert (carried.stdout, carried.stderr) == (expected.stdout, "")
    assert not list((tmp_path / "cache").rglob("*.so"))
    info = [sys.executable, "-m", "inflight", "info", "--json"]
    told = subprocess.run(info, capture_output=True, text=True, check=True, env={**os.environ, **without})
    assert json.loads(told.stdout)["kernels"] == "avx2"


@needs_avx2
@pytest.mark.thorough
def test_kernels_of_a_wheel_serve_a_torch_that_it_has_no_bridge_for(package: Path, tmp_path: Path) -> None:
    other, cache = tmp_path / "site", tmp_path / "cache"
    shutil.copytree(package, other)
    [bridge] = other.rglob("torch-*.so")
    bridge.rename(bridge.with_name("torch-2.99.0.so"))
    done = generate(PYTHONPATH=str(other), XDG_CACHE_HOME=str(cache))
    assert done.stdout == generate().stdout
    assert [path.name.split("-")[0] for path in cache.rglob("*.so")] == ["bridge"]


@needs_avx2
@pytest.mark.thorough
def test_libraries_of_a_wheel_that_do_not_load_are_built_instead(package: Path, tmp_path: Path) -> None:
    broken = tmp_path / "site"
    shutil.copytree(package, broken)
    for library in broken.rglob("*.so"):
        library.write_bytes(b"not a library")
    done = generate(PYTHONPATH=str(broken))
    assert (done.stdout, done.stderr.count("building them")) == (generate().stdout, 2)


@pytest.mark.skipif("avx512f" not in native.instruction_sets().split(), reason="others are tested as they are")
@pytest.mark.thorough
def test_a_cpu_without_avx512_gets_correct_kernels(package: Path) -> None:
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
        "PYTHONPATH": str(package),  # our kernels
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "PYTEST_ADDOPTS": "",
    }
    done = subprocess.run(
        [*command, *tests], capture_output=True, text=True, env={**os.environ, **of_that_cpu}, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize(
    ("can", "may_use_matrix_unit", "best"),
    [
        ("", False, None),
        ("avx2 fma", False, None),
        (AVX2, False, "avx2"),
        (f"{AVX2} avx_vnni", False, "avx2-vnni"),
        (f"{AVX2} {AVX512}", False, "avx512"),
        (f"{AVX2} {AVX512} avx512_vnni avx512vbmi", False, "avx512-vnni"),
        (f"{AVX2} {AVX512} avx_vnni avx512_vnni avx512_bf16 avx512vbmi", False, "avx512-bf16"),
        (f"{AVX2} {AVX512} {AMX}", True, "amx"),
        (f"{AVX2} {AVX512} {AMX}", False, "avx512-bf16"),
    ],
)
def test_a_cpu_gets_the_best_of_the_package(
    can: str, may_use_matrix_unit: bool, best: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "SOURCES", tmp_path)
    monkeypatch.setattr(native, "instruction_sets", lambda: f"flags : {can}")
    monkeypatch.setattr(native, "_may_use_matrix_unit", lambda: may_use_matrix_unit)
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    assert native.carried_kernels() is None
    for target in TARGETS["x86_64"]:
        library = tmp_path / carried_kernels_name(target)
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
    found = native.carried_kernels()
    assert (found and found.stem) == best


def test_a_matrix_unit_that_linux_denies_is_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "instruction_sets", lambda: "flags : avx2 amx_tile amx_int8")
    monkeypatch.setattr(native, "_may_use_matrix_unit", lambda: False)
    assert "-mno-amx-tile" in native._native_flags()
    monkeypatch.setattr(native, "_may_use_matrix_unit", lambda: True)
    assert "-mno-amx-tile" not in native._native_flags()


def test_operators_refuse_arguments_that_do_not_fit() -> None:
    """`make soak` makes many more such calls under AddressSanitizer."""
    assert kernels_available()
    fuzzer = Fuzzer(seed=0)
    fuzzer.run(100)
    assert fuzzer.refused.total() > 300
    assert fuzzer.accepted.total() > 300
    assert fuzzer.accepted.keys() >= fuzzer.refused.keys(), "an operator that refuses everything is not tried at all"


def test_operators_refuse_tensors_of_more_dimensions_than_they_can_hold() -> None:
    assert torch.ops.inflight.activate(torch.ones([1] * 16), "relu", "none").shape == (1,) * 16
    with pytest.raises(RuntimeError, match="16 dimensions here, not 17"):
        torch.ops.inflight.activate(torch.ones([1] * 17), "relu", "none")


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
        operators.begin_step(backend._step, given["block_size"], *lengths, None, [given["indices"]], [table])

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
