"""Which library of kernels this process loads: one that the package carries, one built here before, or a new one.

A wheel carries libraries for several kinds of CPUs, each for one version of torch. Where none of them fits, and in a
checkout, the kernels are built for this CPU and kept on disk. Such a library's file name is a digest of everything that
went into it: sources, compiler, flags, torch, and this CPU's instruction sets. So in a home folder that several
machines share, none of them runs instructions that were chosen for another.
"""

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from inflight.execution.kernels.building import FLAGS, SOURCES, TARGETS, build, carried_name, compiler

logger = logging.getLogger(__name__)


def load_library() -> str:
    """Load one. Returns whose kernels they are: the name of a kind of CPU that the package has them for, or "native".

    Raises:
        OSError, RuntimeError: there is none, and none can be built or kept, or torch cannot load it.
    """
    carried = carried_library()
    if carried is not None:
        try:
            torch.ops.load_library(str(carried))  # type: ignore[no-untyped-call]
            return carried.stem
        except OSError as error:
            logger.warning("the package's kernels do not fit this system (%s), so they are built here", error)
    torch.ops.load_library(str(built_library()))  # type: ignore[no-untyped-call]
    return "native"


def carried_library() -> Path | None:
    """The best in the package for this CPU and this torch, if there is one."""
    can = set(instruction_sets().split())
    if "amx_tile" in can and not _may_use_matrix_unit():
        can.remove("amx_tile")
    for target in reversed(TARGETS.get(platform.machine(), ())):
        library = SOURCES / carried_name(target)
        if target.needs <= can and library.exists():
            return library
    return None


def built_library() -> Path:
    """The one for this machine, built if it is not on disk yet. It may be in a folder that cannot be written."""
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
                with _timed("inflight: building its CPU kernels for this machine, once …"):
                    build(library, _native_flags())
    return library


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
    torch_build = (torch.__version__, str(torch.version.git_version))
    for part in (*torch_build, *FLAGS, *_native_flags(), instruction_sets()):
        digest.update(part.encode() + b"\0")
    digest.update(subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout)
    return digest.hexdigest()[:20]


def _native_flags() -> list[str]:
    """The compiler's, for this CPU."""
    option = "-march" if platform.machine() == "x86_64" else "-mcpu"
    without = ["-mno-amx-tile"] if " amx_tile " in instruction_sets() and not _may_use_matrix_unit() else []
    return [f"{option}=native", *without]


def _may_use_matrix_unit() -> bool:
    """Whether Linux lets this process use the CPU's matrix unit (AMX), for which a process must ask."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def instruction_sets() -> str:
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
