"""`ScoredBlocks`: an answer's blocks, and the log-probabilities of the tokens of its texts.

Decides which text a token belongs to: the one that grows when, at the latest, the token's own text is certain.
"""

from typing import Any

from inflight.server.chat_format.blocks import Blocks, Growth, TextBlock
from inflight.server.chat_format.template_reader import TemplateReader


class ScoredBlocks(Blocks):
    """`Blocks` that are told the log-probabilities of tokens as they come.

    Attributes:
        scores: those of each text, by the number of its block.
    """

    def __init__(self, reader: TemplateReader | None) -> None:
        super().__init__(reader)
        self.scores: dict[int, list[dict[str, Any]]] = {}
        self._pending: list[dict[str, Any]] = []  # of tokens whose text is still to come, or belongs to no text
        self._is_behind_other = False  # whether a thought or a call has grown since a text has

    def see(self, token_logprobs: list[dict[str, Any]]) -> None:
        """Take those of tokens that come now, before their text is fed."""
        self._pending += token_logprobs

    def taken_by(self, growth: Growth) -> list[dict[str, Any]]:
        """Return those that belong to what a block has grown by; tokens of thoughts and calls have none."""
        if not isinstance(growth.block, TextBlock):
            self._is_behind_other = True
            return []
        taken, self._pending = self._pending, []
        if self._is_behind_other:
            taken, self._is_behind_other = _last(taken, len(growth.added)), False
        self.scores.setdefault(growth.number, []).extend(taken)
        return taken

    def rest(self) -> list[dict[str, Any]]:
        """Return those of tokens at the end that have no text; they belong to the last block."""
        last = len(self.blocks) - 1
        return self.taken_by(Growth(last, self.blocks[last], "", is_new=False)) if self._pending else []


def _last(token_logprobs: list[dict[str, Any]], num_characters: int) -> list[dict[str, Any]]:
    """Return those of the last tokens, enough to have so many characters."""
    first = len(token_logprobs)
    while first and num_characters > 0:
        first -= 1
        num_characters -= len(token_logprobs[first]["token"])
    return token_logprobs[first:]
