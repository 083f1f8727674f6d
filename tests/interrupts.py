"""Make Ctrl-C reach child processes: tests started in the background ignore it, and children inherit that."""

import signal
import subprocess
from collections.abc import Mapping, Sequence


def heed_interrupts() -> None:
    """For `Popen`'s `preexec_fn`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted_after_a_line(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """Run a command and interrupt it after its first line. Returns its standard output and error; checks for the exit
    code of an interrupt."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=heed_interrupts,
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 130
    return first + rest, errors
