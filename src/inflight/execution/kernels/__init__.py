"""Our C++ kernels for the CPU: built once for a machine, and kept on disk.

If `kernels_available()`, the operators are `torch.ops.inflight.*` (`operators.cpp` lists them). The library's file name
is a digest of everything that went into it: sources, compiler, flags, torch, and this CPU's instruction sets. So in a
home folder that several machines share, none of them runs instructions that were chosen for another.
"""

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
PANEL_OUTPUTS = 32
"""Outputs of a layer that lie side by side, wherever a kernel multiplies with its weight."""
COMPILER_FLAGS = [  # without contraction: GCC fuses a product and a sum in one copy of a function, and not in another
    *("-std=c++20", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
    *("-fvisibility=hidden", "-fvisibility-inlines-hidden"),
    *("-Wno-psabi", "-Wno-unknown-pragmas"),
]


@functools.cache
def kernels_available() -> bool:
    """Whether `torch.ops.inflight` exists. The first call builds and loads it, and warns if that fails."""
    if sys.platform != "linux":
        return False
    try:
        library = _built_library()
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        _describe_operators()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        lines = str(error).strip().split("\n")
        reason = next((line for line in lines if " error: " in line), lines[0])  # the compiler's
        logger.warning("no CPU kernels of our own (%s): attention runs through torch's operators, slower", reason)
        return False
    return True


def has_panels(dtype: torch.dtype) -> bool:
    """Whether our linear layers run on this CPU for weights that are stored in `dtype`."""
    return kernels_available() and bool(torch.ops.inflight.has_panels(dtype))


def delete_with(owner: object, operator: Callable[[int], None], number: int) -> None:
    """Call an operator with the number of something of the kernels' when its owner is gone."""
    weakref.finalize(owner, _call_unseen, operator, number)


def _call_unseen(operator: Callable[[int], None], number: int) -> None:
    """The garbage collector may come in the middle of a forward pass that somebody watches, or that has no data."""
    with torch._C._DisableTorchDispatch():
        operator(number)


def _describe_operators() -> None:
    """Tell torch the shapes of our operators' results, for forward passes without data."""

    def linear(x: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
        return x.new_empty(*x.shape[:-1], out_features)

    def write(key: torch.Tensor, value: torch.Tensor, call: int) -> None:
        return None

    def attend(query: torch.Tensor, sinks: torch.Tensor | None, call: int, value_head_size: int) -> torch.Tensor:
        return query.new_empty(query.shape[0], query.shape[1], value_head_size)

    def activate(x: torch.Tensor, activation: str, variant: str) -> torch.Tensor:
        return x.new_empty(x.shape)

    def experts(x: torch.Tensor, chosen: torch.Tensor, number: int) -> torch.Tensor:
        return x.new_empty(chosen.shape[0] * chosen.shape[1], x.shape[1])

    def experts_part(x: torch.Tensor, chosen: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
        return x.new_empty(chosen.shape[0] * chosen.shape[1], out_features)

    def weighted_sum(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return rows.new_empty(weights.shape[0], rows.shape[1])

    def grouped_rows(
        layout: list[int],
        panels: torch.Tensor,
        rows: torch.Tensor,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        return panels.new_empty(rows.shape[0], in_features, dtype=dtype)

    torch.library.register_fake("inflight::linear", linear)
    torch.library.register_fake("inflight::grouped_rows", grouped_rows)
    torch.library.register_fake("inflight::experts", experts)
    torch.library.register_fake("inflight::experts_up", experts_part)
    torch.library.register_fake("inflight::experts_down", experts_part)
    torch.library.register_fake("inflight::weighted_sum", weighted_sum)
    torch.library.register_fake("inflight::write", write)
    torch.library.register_fake("inflight::attend", attend)
    torch.library.register_fake("inflight::activate", activate)


def _built_library() -> Path:
    """The library for this machine, built if it is not on disk yet. It may be in a folder that cannot be written."""
    name = f"kernels-{_digest()}.so"
    if os.path.exists(_user_folder() / name):  # and False, not an error, where nobody may look
        return _user_folder() / name
    folder = cache_folder()
    if folder != _user_folder():
        logger.warning(
            "%s cannot be written, so the CPU kernels are built at every start; XDG_CACHE_HOME names another folder",
            _user_folder(),
        )
    library = folder / name
    if not library.exists():
        with _lock(folder / "lock"):
            if not library.exists():
                _build(library)
    return library


def _build(library: Path) -> None:
    from torch.utils import cpp_extension  # slow to import, and rarely needed

    said = "inflight: building its CPU kernels for this machine, once …"
    with tempfile.TemporaryDirectory(dir=library.parent) as folder, _ninja_on_path(), _timed(said):
        cpp_extension.load(
            "inflight_kernels",
            [str(source) for source in sorted(SOURCES.glob("*.cpp"))],
            extra_cflags=[*COMPILER_FLAGS, *_native_flags()],
            extra_ldflags=["-fopenmp"],
            build_directory=folder,
            is_python_module=False,
            is_standalone=False,
        )
        os.replace(Path(folder) / "inflight_kernels.so", library)


@contextmanager
def _timed(said: str, interval: float = 1.0) -> Iterator[None]:
    """Print a line to standard error, and at the end how long it took; meanwhile the seconds run, on a terminal."""
    start, ended = time.monotonic(), threading.Event()

    def run() -> None:
        while not ended.wait(interval):
            print(f"\r{said} {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)

    print(said, end="", file=sys.stderr, flush=True)
    clock = threading.Thread(target=run, daemon=True)
    if is_terminal := sys.stderr.isatty():
        clock.start()
    how = "failed"
    try:
        yield
        how = f"{time.monotonic() - start:.0f} s"
    finally:
        ended.set()
        if is_terminal:
            clock.join()
        print(f"\r{said} {how}" if is_terminal else f" {how}", file=sys.stderr)


def _digest() -> str:
    """Names the library; differs whenever a build would."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.read_bytes())
    compiler = subprocess.run([_compiler(), "--version"], capture_output=True, check=True).stdout
    torch_build = (torch.__version__, str(torch.version.git_version))
    for part in (*torch_build, *COMPILER_FLAGS, *_native_flags(), _instruction_sets()):
        digest.update(part.encode() + b"\0")
    digest.update(compiler)
    return digest.hexdigest()[:20]


def _compiler() -> str:
    """The compiler that `cpp_extension` will use."""
    name = os.environ.get("CXX", "c++")
    if shutil.which(name) is None:
        raise OSError(f"there is no C++ compiler {name!r} here")
    return name


def _native_flags() -> list[str]:
    """The flags that target this CPU, or the one that `INFLIGHT_TARGET_CPU` names (for tests)."""
    option = "-march" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu"
    without = ["-mno-amx-tile"] if " amx_tile " in _instruction_sets() and not _may_use_matrix_unit() else []
    return [f"{option}={os.environ.get('INFLIGHT_TARGET_CPU', 'native')}", *without]


def _may_use_matrix_unit() -> bool:
    """Whether Linux lets this process use the CPU's matrix unit (AMX), for which a process must ask."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def _instruction_sets() -> str:
    """What this CPU can do, as the operating system reports it."""
    lines = Path("/proc/cpuinfo").read_text().split("\n")
    kinds = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


@functools.cache
def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/inflight` or `~/.cache/inflight`; a temporary folder if that is not writable."""
    folder = _user_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="inflight-"))


def _user_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inflight"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Inside, only one process runs. The lock is released when its process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Inside, ninja is on PATH, where `cpp_extension` looks for it. (An environment that was not activated does not put
    it there.)"""
    path, spec = os.environ.get("PATH", ""), importlib.util.find_spec("ninja")
    if spec is not None and shutil.which("ninja") is None:
        import ninja

        os.environ["PATH"] = os.pathsep.join([str(ninja.BIN_DIR), path])
    try:
        yield
    finally:
        os.environ["PATH"] = path
