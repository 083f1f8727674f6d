"""`Blocks`: an answer as reasoning, texts and tool calls in order, as in Anthropic's messages and OpenAI's responses.

Divides the answer into blocks. Knows no transport.
"""

import uuid
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from inflight.text.tokenizer import Tokenizer


def _new_key() -> str:
    return uuid.uuid4().hex


@dataclass(slots=True)
class _Block:
    text: str = ""
    key: str = field(default_factory=_new_key)


class TextBlock(_Block):
    """A text; `key` is unique to the block."""


class ReasoningBlock(_Block):
    """Reasoning; `key` is unique to the block."""


@dataclass(slots=True)
class CallBlock:
    """A tool call with its arguments in JSON; `key` is unique to the block."""

    call_id: str
    name: str
    arguments: str = ""
    key: str = field(default_factory=_new_key)


Block: TypeAlias = TextBlock | ReasoningBlock | CallBlock


class BlockDelta(NamedTuple):
    """An addition to the last block: text, or part of its arguments. A new block ends the previous ones."""

    number: int
    block: Block
    added: str
    is_new: bool


class Blocks:
    """One answer, divided as it grows. Here it is all text; `TemplateReader` finds reasoning and calls.

    Attributes:
        blocks: the blocks so far.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._grown: list[BlockDelta] = []

    @property
    def num_calls(self) -> int:
        return self.num_calls_before(len(self.blocks))

    def num_calls_before(self, number: int) -> int:
        """The number of calls before this block."""
        return sum(isinstance(block, CallBlock) for block in self.blocks[:number])

    def text_of(self, kind: type[TextBlock | ReasoningBlock]) -> str:
        """The text of all blocks of a kind."""
        return "".join(block.text for block in self.blocks if isinstance(block, kind))

    def num_reasoning_tokens(self, tokenizer: Tokenizer) -> int:
        """The number of reasoning tokens, counted by encoding the text again."""
        texts = [block.text for block in self.blocks if isinstance(block, ReasoningBlock)]
        return sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)

    def feed(self, text: str, *, is_last: bool = False) -> list[BlockDelta]:
        """Add `text` to the answer and return how its blocks grew. A finished answer has at least one block."""
        self._take(text, is_last)
        if is_last and not self.blocks:
            self._add(TextBlock, "")
        grown, self._grown = self._grown, []
        return grown

    def _take(self, text: str, is_last: bool) -> None:
        if text:
            self._add(TextBlock, text)

    def _add(self, kind: type[TextBlock | ReasoningBlock], text: str) -> None:
        last = self.blocks[-1] if self.blocks else None
        if is_new := not isinstance(last, kind):
            last = kind()
            self.blocks.append(last)
        last.text += text
        self._grown.append(BlockDelta(len(self.blocks) - 1, last, text, is_new))
