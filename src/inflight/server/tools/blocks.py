"""`Blocks`: an answer as a row of texts and calls, which is how Anthropic's messages and OpenAI's responses have it.

Decides where one block ends and the next begins. Knows no transport.
"""

import uuid
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from inflight.server.tools.call_parser import Piece
from inflight.server.tools.tool_use import ToolUse


def _new_key() -> str:
    return uuid.uuid4().hex


@dataclass(slots=True)
class TextBlock:
    """Text; `key` is no other block's."""

    text: str = ""
    key: str = field(default_factory=_new_key)


@dataclass(slots=True)
class CallBlock:
    """A call of a tool, with its arguments in JSON; `key` is no other block's."""

    call_id: str
    name: str
    arguments: str = ""
    key: str = field(default_factory=_new_key)


Block: TypeAlias = TextBlock | CallBlock


class Growth(NamedTuple):
    """The last block has grown: by so much text, or so much of its arguments. If it is new, those before have ended."""

    number: int
    block: Block
    added: str
    is_new: bool


class Blocks:
    """Of one answer.

    Args:
        tools: how calls are read, if tools may be called.

    Attributes:
        blocks: so far.
    """

    def __init__(self, tools: ToolUse | None) -> None:
        self.blocks: list[Block] = []
        self._parser = None if tools is None else tools.parser()

    @property
    def has_calls(self) -> bool:
        return any(isinstance(block, CallBlock) for block in self.blocks)

    def feed(self, text: str, *, is_last: bool) -> list[Growth]:
        """The answer's text has grown; there is one block at its end at least."""
        if self._parser is None:
            pieces: list[Piece] = [text] if text else []
        else:
            pieces = self._parser.feed(text)
            if is_last:
                pieces += self._parser.finish()
        if is_last and not pieces and not self.blocks:
            pieces = [""]
        return list(map(self._grow, pieces))

    def _grow(self, piece: Piece) -> Growth:
        last, num_before = self.blocks[-1] if self.blocks else None, len(self.blocks)
        if isinstance(piece, str):
            added = piece
            if not isinstance(last, TextBlock):
                last = TextBlock()
                self.blocks.append(last)
            last.text += added
        else:
            added = piece.arguments
            if piece.name is not None and piece.call_id is not None:
                last = CallBlock(piece.call_id, piece.name)
                self.blocks.append(last)
            assert isinstance(last, CallBlock)
            last.arguments += added
        return Growth(len(self.blocks) - 1, last, added, len(self.blocks) > num_before)
