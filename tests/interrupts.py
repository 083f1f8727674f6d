"""Processes that Ctrl-C reaches, wherever the tests run: one started in the background hands on that it is ignored."""

import signal


def heed_interrupts() -> None:
    """For `Popen`'s `preexec_fn`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
