"""What a text is divided into, as it grows: thoughts, content, and pieces of tool calls. Plain data."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Thought:
    """Text that the model writes for itself, before or between what it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call. The first piece of each call has the id and the name.

    Attributes:
        index: the call's number within the text.
        arguments: what to append to the arguments; the pieces together are JSON.
    """

    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


Piece: TypeAlias = str | Thought | CallDelta
"""Content, a thought, or a piece of a call."""


class Reader(Protocol):
    """Divides one text. The joined pieces do not depend on how the text was cut into deltas."""

    @property
    def num_calls(self) -> int:
        """Calls found so far."""
        ...

    def feed(self, delta: str) -> list[Piece]:
        """Return the pieces that are certain now that the text has grown by `delta`."""
        ...

    def finish(self) -> list[Piece]:
        """Return what was held back, at the end of the text."""
        ...
