"""Forks our processes from one that has already imported torch and `transformers`. A user's processes import them
themselves, which takes three to five CPU seconds each; their behaviour afterwards is the same. This replaces
`python_process.started` in a test's process and its descendants. Tests of process starts use the fixture
`fresh_processes`.
"""

import functools
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO

from inflight.engine.process import connection
from inflight.engine.ranks import group
from inflight.host import python_process

PRELOADED = (
    "inflight.engine.engine",
    "inflight.engine.process.loop",
    "inflight.engine.ranks.following",
    "inflight.execution.ranks.rank",
    "inflight.execution.mapped_memory",
    "inflight.text.tokenizer_files",
)
STANDARD = (0, 1, 2)
MOST_FILES = 32
FIRST_FREE = 500
"""File descriptors from here on are unused."""
SECONDS_TO_BEGIN = 300.0


class Forked:
    """The part of `Popen` that tests and `ProcessConnection` use."""

    def __init__(self, control: socket.socket, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._control = control
        self._has_ended = threading.Event()
        control.settimeout(SECONDS_TO_BEGIN)
        (self.pid,) = struct.unpack("i", control.recv(4))
        control.settimeout(None)
        threading.Thread(target=self._listen, daemon=True).start()

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _listen(self) -> None:
        with self._control:
            said = self._control.recv(4)
        self.returncode = struct.unpack("i", said)[0] if said else -signal.SIGKILL
        self._has_ended.set()


def stand_in(address: str, begin: Callable[[], object] = lambda: None) -> None:
    """Let this process start others through the server at an address. `begin` is called before each."""

    def started(module: str, files: Collection[int] = ()) -> Forked:
        begin()
        (own_in, stdin), (stdout, own_out) = os.pipe(), os.pipe()
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.connect("\0" + address)
        numbers = (*STANDARD, *files)
        asked = {
            "module": module,
            "numbers": numbers,
            "environment": python_process.IDLE_THREADS_SLEEP | os.environ,
            "path": list(map(os.path.abspath, sys.path)),
            "folder": os.getcwd(),
            "cpus": os.sched_getaffinity(0),
        }
        socket.send_fds(control, [pickle.dumps(asked)], [own_in, own_out, 2, *files])
        os.close(own_in)
        os.close(own_out)
        return Forked(control, os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb"))

    connection.started = group.started = started  # type: ignore[assignment]


def serve_preloaded() -> None:
    """Let this process use a fork server, which starts with the first child and ends with this process. Does nothing
    outside Linux."""
    if sys.platform != "linux":
        return
    address = f"inflight: {uuid.uuid4()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + address)
    listener.listen(100)

    @functools.cache
    def server() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.preloaded", address],
            stdin=subprocess.PIPE,
            stdout=listener.fileno(),
            env=python_process.IDLE_THREADS_SLEEP | os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )

    stand_in(address, server)


class _Server:
    """The fork server. Its standard input closes when its parent ends; it prints the address on which it listens."""

    def __init__(self) -> None:
        self._listener = socket.socket(fileno=os.dup(1))
        self._controls: dict[int, socket.socket] = {}
        self._woken, waking = os.pipe()
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._own_files = [self._woken, waking]

    def next_child(self) -> "tuple[dict[str, Any], socket.socket]":
        """Serve. Returns in each forked process, with the program to run and the connection that reports its start."""
        while True:
            ready, _, _ = select.select([0, self._woken, self._listener], [], [])
            if 0 in ready:
                os._exit(0)
            if self._woken in ready:
                os.read(self._woken, 4096)
                self._tell_ends()
            if self._listener in ready and (child := self._accept()) is not None:
                return child

    def _accept(self) -> "tuple[dict[str, Any], socket.socket] | None":
        control, _ = self._listener.accept()
        message, files, _, _ = socket.recv_fds(control, 2**20, MOST_FILES)
        pid = os.fork()
        if pid == 0:
            asked: dict[str, Any] = pickle.loads(message)
            for own in (*self._controls.values(), self._listener):
                own.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control = socket.socket(fileno=_moved(control.detach(), FIRST_FREE - 1))
            _take(files, asked["numbers"], self._own_files)
            return asked, control
        for file in files:
            os.close(file)
        self._controls[pid] = control
        return None

    def _tell_ends(self) -> None:
        while self._controls:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._controls.pop(pid) as control, suppress(OSError):  # its parent may have ended
                control.send(struct.pack("i", os.waitstatus_to_exitcode(status)))


def _take(files: list[int], numbers: Iterable[int], own: list[int]) -> None:
    """Install the received file descriptors under their numbers."""
    received = [_moved(file, FIRST_FREE + number) for number, file in enumerate(files)]
    for file in own:
        os.close(file)
    for file, number in zip(received, numbers, strict=True):
        _moved(file, number)


def _moved(file: int, number: int) -> int:
    os.dup2(file, number)
    os.close(file)
    return number


def _become(asked: dict[str, Any], address: str) -> None:
    """Run a module as `python -m` does."""
    os.setsid()
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    os.sched_setaffinity(0, asked["cpus"])
    sys.path[:] = asked["path"]
    stand_in(address)


if __name__ == "__main__":
    for name in PRELOADED:
        import_module(name)
    asked, control = _Server().next_child()
    _become(asked, sys.argv.pop())
    with control:
        control.send(struct.pack("i", os.getpid()))
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
