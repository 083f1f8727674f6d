"""How messages get from rank to rank: over the streams of a process, or over a network. They are pickled, so each side
trusts the other: it has started it, or they have the same key."""

import pickle
import socket
from contextlib import suppress
from multiprocessing.connection import Connection
from subprocess import Popen
from typing import IO, Protocol

from inflight.engine.frames import framed, read_frame
from inflight.engine.python_process import ending
from inflight.engine.ranks.messages import Message


class Link(Protocol):
    """Rank 0's way to another rank, or back. One thread sends, one receives."""

    def send(self, message: Message) -> None:
        """Raises `OSError` if the other side has ended."""

    def receive(self) -> Message | None:
        """Wait for the next message; None: the other side has ended."""

    def ending(self) -> str:
        """How it ended, such as "was killed by SIGKILL"."""


class StreamLink:
    """Over two streams."""

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self._incoming, self._outgoing = incoming, outgoing

    def send(self, message: Message) -> None:
        self._outgoing.write(framed(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)))
        self._outgoing.flush()

    def receive(self) -> Message | None:
        frame = read_frame(self._incoming)
        return None if frame is None else pickle.loads(frame)

    def ending(self) -> str:
        return "has ended"


class ProcessLink(StreamLink):
    """Over the standard streams of a process that was started here."""

    def __init__(self, process: "Popen[bytes]") -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        super().__init__(process.stdout, process.stdin)
        self._process = process

    def ending(self) -> str:
        return ending(self._process.wait())


class NetworkLink:
    """Over a connection, whose two sides have shown each other that they have the same key.

    Args:
        peer: the address of the other side.
    """

    def __init__(self, connection: "Connection[bytes, bytes]", peer: str) -> None:
        self._connection, self.peer = connection, peer

    def send(self, message: Message) -> None:
        self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> Message | None:
        try:
            return pickle.loads(self._connection.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, OSError):
            return None

    def ending(self) -> str:
        return f"on {self.peer} has left"

    def close(self) -> None:
        """End it for both sides, whoever waits."""
        with suppress(OSError), socket.fromfd(self._connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as same:
            same.shutdown(socket.SHUT_RDWR)
