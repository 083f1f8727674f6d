"""What a reader reports, as plain values: text, reasoning, and pieces of calls."""

from collections.abc import Iterable
from dataclasses import dataclass

from inflight.server.chat_format.blocks import Blocks, CallBlock, ReasoningBlock


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallDelta:
    """The first piece of each call has the id and the name."""

    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


Piece = str | Reasoning | CallDelta


def fed(reader: Blocks, text: str, *, is_last: bool = False) -> list[Piece]:
    """What the reader reports when it is fed a text."""
    pieces: list[Piece] = []
    for number, block, added, is_new in reader.feed(text, is_last=is_last):
        if isinstance(block, CallBlock):
            head = (block.call_id, block.name) if is_new else (None, None)
            pieces.append(CallDelta(reader.num_calls_before(number), added, *head))
        elif added:
            pieces.append(Reasoning(added) if isinstance(block, ReasoningBlock) else added)
    return pieces


def read_all(reader: Blocks, texts: Iterable[str]) -> list[Piece]:
    """What the reader reports of a whole answer."""
    return [piece for text in texts for piece in fed(reader, text)] + fed(reader, "", is_last=True)
