"""Compiling the kernels: for this CPU at first use, or for every `BuildTarget` of a wheel.

There are two libraries: kernels independent of torch, and a bridge (`BRIDGE`) built for a version of torch. This file
imports nothing of inflight, because the wheel's build hook (`tools/wheel_kernels.py`) loads it by path.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
BRIDGE = "torch_bridge.cpp"
FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wno-psabi"]
KERNEL_FLAGS = [  # without contraction: GCC fuses a product and a sum in one copy of a function, and not in another
    *("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
]
BRIDGE_FLAGS = ["-O1", "-fopenmp"]


@dataclass(frozen=True)
class BuildTarget:
    """A target CPU.

    Attributes:
        name: of its library.
        flags: of the compiler, for this target.
        needs: instruction sets that the CPU must have.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]

    def beyond(self, name: str, flags: str, needs: str) -> "BuildTarget":
        """An extended target. The compiler takes the last `-march`."""
        return BuildTarget(name, (*self.flags, *flags.split()), self.needs | set(needs.split()))


_AVX2 = BuildTarget("avx2", ("-march=x86-64-v3",), frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")))
_AVX512 = _AVX2.beyond("avx512", "-march=x86-64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl")
_AVX512_VNNI = _AVX512.beyond("avx512-vnni", "-mavx512vnni", "avx512_vnni")
_AVX512_BF16 = _AVX512_VNNI.beyond("avx512-bf16", "-mavx512bf16 -mavx512vbmi", "avx512_bf16 avx512vbmi")
_ARMV8 = BuildTarget("armv8", ("-march=armv8-a",), frozenset(("asimd",)))
TARGETS = {  # the last one that runs is the best
    "x86_64": (
        *(_AVX2, _AVX2.beyond("avx2-vnni", "-mavxvnni", "avx_vnni")),
        *(_AVX512, _AVX512_VNNI, _AVX512_BF16),
        _AVX512_BF16.beyond("amx", "-mamx-tile -mamx-bf16 -mamx-int8", "amx_tile amx_bf16 amx_int8"),
    ),
    "aarch64": (_ARMV8, _ARMV8.beyond("armv8-dotprod", "-march=armv8.2-a+dotprod", "asimddp")),
}
"""By machine."""


def carried_kernels_name(target: BuildTarget) -> str:
    """The path of the kernels for `target` in a wheel's folder."""
    return f"carried/{target.name}.so"


def carried_bridge_name(torch_version: str = torch.__version__) -> str:
    """The path of the bridge for a version of torch in a wheel's folder. Torch's C++ interface changes between
    versions, but not with CUDA support."""
    return f"carried/torch-{torch_version.partition('+')[0]}.so"


def compiler() -> str:
    """The C++ compiler: `CXX`, or `c++`. Raises `OSError` if it is missing."""
    name = os.environ.get("CXX", "c++")
    if shutil.which(name) is None:
        raise OSError(f"there is no C++ compiler {name!r} here")
    return name


def build_kernels(library: Path, target_flags: Sequence[str]) -> None:
    """Compile the kernels for a CPU, with the compiler's flags for it. Raises as `build_bridge`."""
    sources = set(SOURCES.glob("*.cpp")) - {SOURCES / BRIDGE}
    _build(library, sources, [*FLAGS, *KERNEL_FLAGS, *target_flags], [])


def build_bridge(library: Path, folder: Path = Path(torch.__file__).parent) -> None:
    """Compile the bridge to a torch.

    Args:
        library: the output, replaced atomically.
        folder: that of the package `torch`.

    Raises:
        OSError: no compiler, or no disk space.
        RuntimeError: the compiler failed; with its output.
    """
    include = [f"-isystem{folder / 'include' / part}" for part in ("", "torch/csrc/api/include")]
    flags = [*FLAGS, *BRIDGE_FLAGS, *include]
    _build(library, [SOURCES / BRIDGE], flags, [f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu"])


def _build(library: Path, sources: Iterable[Path], flags: list[str], libraries: list[str]) -> None:
    """Compile on all usable cores, large files first, so that all cores finish together."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:

        def compile_source(source: Path) -> str:
            compiled = f"{folder}/{source.stem}.o"
            _run([*flags, "-c", str(source), "-o", compiled])
            return compiled

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_source, sorted(sources, key=lambda source: -source.stat().st_size)))
        linked = f"{folder}/linked.so"
        _run(["-shared", *flags, *objects, *libraries, "-o", linked])
        os.replace(linked, library)


def _run(arguments: list[str]) -> None:
    done = subprocess.run([compiler(), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"the C++ compiler failed with status {done.returncode}")
