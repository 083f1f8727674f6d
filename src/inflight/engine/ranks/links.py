"""Pickled messages between ranks, over the standard streams of a process started by rank 0."""

import pickle
from subprocess import Popen
from typing import IO

from inflight.engine.frames import framed, read_frame
from inflight.engine.ranks.messages import Message
from inflight.host.python_process import ending


class StreamLink:
    """One side of a connection between two ranks. One thread sends, one receives."""

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self._incoming, self._outgoing = incoming, outgoing

    def send(self, message: Message) -> None:
        """Raises `OSError` if the other side has ended."""
        self._outgoing.write(framed(pickle.dumps(message, pickle.HIGHEST_PROTOCOL)))
        self._outgoing.flush()

    def receive(self) -> Message | None:
        """Wait for the next message; None: the other side has ended."""
        frame = read_frame(self._incoming)
        return None if frame is None else pickle.loads(frame)


class ProcessLink(StreamLink):
    """Rank 0's, to a process that was started here."""

    def __init__(self, process: "Popen[bytes]") -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        super().__init__(process.stdout, process.stdin)
        self._process = process

    def ending(self) -> str:
        """The process's exit, such as "was killed by SIGKILL"."""
        return ending(self._process.wait())
