"""Compiling the kernels: for this CPU at first use, or for the kinds of CPUs (`Target`) that a wheel carries them for.

Nothing of inflight is imported here, and of torch only its version and its folder: the hook that fills a wheel
(`tools/wheel_kernels.py`) loads this file by its path.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
FLAGS = [  # without contraction: GCC fuses a product and a sum in one copy of a function, and not in another
    *("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fvisibility=hidden", "-fvisibility-inlines-hidden"),
    *("-Wno-psabi", "-Wno-unknown-pragmas"),
]


@dataclass(frozen=True)
class Target:
    """A kind of CPU.

    Attributes:
        name: of its library.
        flags: the compiler's, for such a CPU.
        needs: what the system must list among a CPU's instruction sets.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]

    def beyond(self, name: str, flags: str, needs: str) -> "Target":
        """The same and more. The compiler takes the last `-march`."""
        return Target(name, (*self.flags, *flags.split()), self.needs | set(needs.split()))


_AVX2 = Target("avx2", ("-march=x86-64-v3",), frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")))
_AVX512 = _AVX2.beyond("avx512", "-march=x86-64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl")
_AVX512_VNNI = _AVX512.beyond("avx512-vnni", "-mavx512vnni", "avx512_vnni")
_AVX512_BF16 = _AVX512_VNNI.beyond("avx512-bf16", "-mavx512bf16 -mavx512vbmi", "avx512_bf16 avx512vbmi")
_ARMV8 = Target("armv8", ("-march=armv8-a",), frozenset(("asimd",)))
TARGETS = {  # a later one is better, where it runs
    "x86_64": (
        *(_AVX2, _AVX2.beyond("avx2-vnni", "-mavxvnni", "avx_vnni")),
        *(_AVX512, _AVX512_VNNI, _AVX512_BF16),
        _AVX512_BF16.beyond("amx", "-mamx-tile -mamx-bf16 -mamx-int8", "amx_tile amx_bf16 amx_int8"),
    ),
    "aarch64": (_ARMV8, _ARMV8.beyond("armv8-dotprod", "-march=armv8.2-a+dotprod", "asimddp")),
}
"""By machine."""


def torch_version() -> str:
    """Of the torch here. Only it may load what was built with it, because torch's C++ interface changes between
    versions; whether it knows CUDA makes no difference."""
    return torch.__version__.partition("+")[0]


def carried_name(target: Target) -> str:
    """Where in this folder a wheel has the library for `target` and this torch."""
    return f"carried/torch-{torch_version()}/{target.name}.so"


def compiler() -> str:
    """The C++ compiler: what `CXX` names, or `c++`. Raises `OSError` if it is not there."""
    name = os.environ.get("CXX", "c++")
    if shutil.which(name) is None:
        raise OSError(f"there is no C++ compiler {name!r} here")
    return name


def build(library: Path, target_flags: Sequence[str]) -> None:
    """Compile all sources on all cores that this process may use, and link them.

    Args:
        library: where to; replaced at once, so nobody sees half of one.
        target_flags: the compiler's flags for the CPU that is to run it.

    Raises:
        OSError: there is no compiler, or no room.
        RuntimeError: the compiler failed; with what it said.
    """
    flags = [*FLAGS, *target_flags]
    torch_folder = Path(torch.__file__).parent
    include = [f"-isystem{torch_folder / 'include' / part}" for part in ("", "torch/csrc/api/include")]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:

        def compile_source(source: Path) -> str:
            compiled = f"{folder}/{source.stem}.o"
            _run([*flags, *include, "-c", str(source), "-o", compiled])
            return compiled

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_source, sorted(SOURCES.glob("*.cpp"))))
        linked = f"{folder}/linked.so"
        _run(["-shared", *flags, *objects, f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-o", linked])
        os.replace(linked, library)


def _run(arguments: list[str]) -> None:
    done = subprocess.run([compiler(), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"the C++ compiler failed with status {done.returncode}")
