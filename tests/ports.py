"""Local ports for tests."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unused_port() -> Iterator[int]:
    """A port of 127.0.0.1 without a listener until the block ends."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        yield port
