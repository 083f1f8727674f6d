"""Make Ctrl-C reach child processes: tests started in the background ignore it, and children inherit that."""

import signal


def heed_interrupts() -> None:
    """For `Popen`'s `preexec_fn`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
