"""`Blocks`: an answer as a sequence of texts and tool calls, the form of Anthropic's messages and OpenAI's responses.

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
    """A text; `key` is unique to the block."""

    text: str = ""
    key: str = field(default_factory=_new_key)


@dataclass(slots=True)
class CallBlock:
    """A tool call with its arguments in JSON; `key` is unique to the block."""

    call_id: str
    name: str
    arguments: str = ""
    key: str = field(default_factory=_new_key)


Block: TypeAlias = TextBlock | CallBlock


class Growth(NamedTuple):
    """What was added to the last block: text or a part of its arguments. A new block ends those before it."""

    number: int
    block: Block
    added: str
    is_new: bool


class Blocks:
    """Splits one answer into blocks.

    Args:
        tools: how tool calls are read, if tools may be called.

    Attributes:
        blocks: the blocks so far.
    """

    def __init__(self, tools: ToolUse | None) -> None:
        self.blocks: list[Block] = []
        self._parser = None if tools is None else tools.parser()

    @property
    def has_calls(self) -> bool:
        return any(isinstance(block, CallBlock) for block in self.blocks)

    def feed(self, text: str, *, is_last: bool) -> list[Growth]:
        """Add `text` to the answer and return how its blocks grew. A finished answer has at least one block."""
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
