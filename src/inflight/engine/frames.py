"""Framing of messages on a pipe: the payload's length (4 bytes, little-endian), then the payload."""

from typing import IO

LENGTH_BYTES = 4


def framed(payload: bytes) -> bytes:
    """A message as a frame."""
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next message; None at the end of the stream, even if it comes in the middle of a frame."""
    header = stream.read(LENGTH_BYTES)
    length = int.from_bytes(header, "little")
    payload = stream.read(length)
    return payload if len(header) == LENGTH_BYTES and len(payload) == length else None
