"""What a text is divided into, as it grows: thoughts, content, and pieces of tool calls. Plain data."""

from dataclasses import dataclass
from typing import TypeAlias


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
