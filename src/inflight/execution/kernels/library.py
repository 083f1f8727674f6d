"""Finds or builds the libraries to load: the kernels and their bridge to torch.

A wheel has kernels for several CPU targets, for any torch, and bridges for some versions of torch. Otherwise, and in a
checkout, libraries are built here and cached on disk, named by a digest of all inputs: sources, compiler, flags, torch,
and this CPU's instruction sets. So machines that share a home folder never run each other's instructions.
"""

import ctypes
import fcntl
import functools
import hashlib
import itertools
import logging
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from inflight.execution.kernels import building
from inflight.execution.kernels.building import BRIDGE, FLAGS, SOURCES, TARGETS, compiler

logger = logging.getLogger(__name__)


def load_library() -> str:
    """Load them. Returns the package's target, or "native".

    Raises:
        OSError, RuntimeError: they cannot be built, cached or loaded.
    """
    carried = carried_kernels()
    kernels, bridge = _loaded(carried), _loaded(SOURCES / building.carried_bridge_name())
    wanted: dict[str, Callable[[Path], None]] = {}
    if is_native := kernels is None:
        wanted[kernels_name()] = lambda library: building.build_kernels(library, _native_flags())
    if bridge is None:
        wanted[bridge_name()] = building.build_bridge
    built = iter([ctypes.CDLL(str(library)) for library in built_libraries(wanted)])
    kernels, bridge = kernels or next(built), bridge or next(built)
    bridge.inflight_bridge.restype = ctypes.c_char_p
    if message := bridge.inflight_bridge(kernels.inflight_kernels):
        raise RuntimeError(message.decode())
    return carried.stem if carried and not is_native else "native"


def carried_kernels() -> Path | None:
    """The package's best kernels for this CPU, if any."""
    can = set(instruction_sets().split())
    if "amx_tile" in can and not _may_use_matrix_unit():
        can.remove("amx_tile")
    for target in reversed(TARGETS.get(platform.machine(), ())):
        library = SOURCES / building.carried_kernels_name(target)
        if target.needs <= can and library.exists():
            return library
    return None


def _loaded(carried: Path | None) -> ctypes.CDLL | None:
    if carried is None or not carried.exists():
        return None
    try:
        return ctypes.CDLL(str(carried))
    except OSError as error:
        logger.warning("the package's kernels do not fit this system (%s); building them", error)
        return None


def built_libraries(wanted: Mapping[str, Callable[[Path], None]]) -> list[Path]:
    """The libraries of these names, built if not cached yet. The folder may be read-only."""
    if all(os.path.exists(_user_folder() / name) for name in wanted):  # False where the folder may not be read
        return [_user_folder() / name for name in wanted]
    folder = cache_folder()
    if folder != _user_folder():
        logger.warning(
            "%s cannot be written, so the CPU kernels are built at every start; set XDG_CACHE_HOME to another folder",
            _user_folder(),
        )
    with _lock(folder / "lock"):
        missing = [name for name in wanted if not (folder / name).exists()]
        if missing:
            with _timed("inflight: building its CPU kernels for this machine, once …"), ThreadPoolExecutor() as pool:
                list(pool.map(lambda name: wanted[name](folder / name), missing))
    return [folder / name for name in wanted]


@contextmanager
def _timed(said: str, interval: float = 1.0) -> Iterator[None]:
    """Print a line to standard error with the elapsed seconds, updated on a terminal."""
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


def kernels_name() -> str:
    """The file name of the kernels for this CPU; it changes with any input of the build."""
    sources = sorted({*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")} - {SOURCES / BRIDGE})
    return f"kernels-{_digest(sources, FLAGS, building.KERNEL_FLAGS, _native_flags(), [instruction_sets()])}.so"


def bridge_name() -> str:
    """The file name of the bridge to this torch, likewise."""
    torch_build = [torch.__version__, str(torch.version.git_version)]
    sources = [SOURCES / name for name in (BRIDGE, "bridge.h", "program_format.h")]
    return f"bridge-{_digest(sources, FLAGS, building.BRIDGE_FLAGS, torch_build)}.so"


def _digest(sources: Iterable[Path], *others: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    for part in itertools.chain(*others):
        digest.update(part.encode() + b"\0")
    digest.update(subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout)
    return digest.hexdigest()[:20]


def _native_flags() -> list[str]:
    """The compiler's flags for this CPU."""
    option = "-march" if platform.machine() == "x86_64" else "-mcpu"
    without = ["-mno-amx-tile"] if " amx_tile " in instruction_sets() and not _may_use_matrix_unit() else []
    return [f"{option}=native", *without]


def _may_use_matrix_unit() -> bool:
    """Whether Linux lets this process use the CPU's matrix unit (AMX), for which a process must ask."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def instruction_sets() -> str:
    """The features of this CPU, as the operating system reports them."""
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
    """An inter-process lock, released if its process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
