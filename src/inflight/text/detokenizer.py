"""`IncrementalDetokenizer`: turns a growing sequence of tokens into text, piece by piece.

It returns text once it is certain. The tokenizer decodes a short window of the last tokens, because a token's text
depends on its neighbours. The window is the method of Hugging Face's text-generation-inference (`prefix_offset` and
`read_offset` in server/text_generation_server/models/model.py), which vLLM uses, too. There are two differences:

- At most one incomplete character is held back. There, a tail that ends in U+FFFD blocks the stream until it ends in
  something else, which never happens in a run of invalid bytes or of tokens that each end in an incomplete character.
- Byte tokens (SentencePiece's byte fallback) are joined into characters before they are decoded. `tokenizers` decodes a
  run of byte tokens as a whole: one invalid byte turns the whole run into U+FFFD, including characters that have long
  been shown (`tokenizers.decoders.DecodeStream` raises then). Here, as in SentencePiece itself, each byte that belongs
  to no character becomes one U+FFFD, and its neighbours do not change. Valid text is the same either way.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice

from inflight.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # a decoder's output for bytes that are not, or not yet, UTF-8

# Tokens of context for the next token: enough to show that it does not begin the text, and to hold all bytes of an
# incomplete character (at most three). Cutting the window only now and then avoids decoding it again at every token.
_MIN_WINDOW = 6
_MAX_WINDOW = 24


class IncrementalDetokenizer:
    """Turns one sequence's output tokens into text deltas, at a cost per token that does not grow with the sequence.

    The joined deltas are the text of `prompt + output` without the text of `prompt`: a first output token keeps its
    leading space, and a character that the prompt left incomplete belongs to the output. They do not depend on how
    tokens are grouped into calls.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._byte_joiner = _ByteJoiner(tokenizer.byte_of_token)
        context = list(islice(filter(self._has_text, reversed(prompt_token_ids)), _MAX_WINDOW))
        self._window = self._join(reversed(context))  # each list has tokens that are decoded together
        self._text = self._decode_window()
        self._num_shown = len(self._text)  # characters of the window's text that need not be shown

    def append(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain after `token_ids`; at most one incomplete character is held back."""
        groups = self._join(filter(self._has_text, token_ids))
        step = _MAX_WINDOW - _MIN_WINDOW
        return "".join(self._advance(groups[start : start + step]) for start in range(0, len(groups), step))

    def finish(self) -> str:
        """Return the text held back, with U+FFFD for an incomplete character."""
        delta = self._advance(self._byte_joiner.flush()) + self._text[self._num_shown :]
        self._num_shown = len(self._text)
        return delta

    def _has_text(self, token_id: int) -> bool:
        return self._tokenizer.has_text(token_id, self._skip_special_tokens)

    def _join(self, token_ids: Iterable[int]) -> list[list[int]]:
        return list(chain.from_iterable(map(self._byte_joiner.feed, token_ids)))

    def _decode_window(self) -> str:
        return self._tokenizer.decode(list(chain.from_iterable(self._window)), self._skip_special_tokens)

    def _advance(self, groups: list[list[int]]) -> str:
        previous = self._text
        self._window += groups
        self._text = self._decode_window()
        if previous.endswith(_REPLACEMENT) and not self._text.startswith(previous):
            self._num_shown = min(self._num_shown, len(previous) - 1)  # the prompt's incomplete character was completed
        # Of several U+FFFD at the end only the last can still become a character: a decoder that replaces bytes writes
        # one for a whole incomplete character, and a second only after bytes that cannot continue the first.
        # Characters made of byte tokens arrive here complete, so with byte tokens a U+FFFD is final.
        ends_in_half = self._text.endswith(_REPLACEMENT) and not self._tokenizer.byte_of_token
        num_certain = max(self._num_shown, len(self._text) - ends_in_half)
        delta = self._text[self._num_shown : num_certain]
        self._num_shown = num_certain
        if len(self._window) > _MAX_WINDOW:
            self._cut_window()
        return delta

    def _cut_window(self) -> None:
        # The shorter window may begin in the middle of a character. That corrupts its first characters, which have long
        # been shown; UTF-8 resynchronises at the next character, so the end of the text is the same.
        num_held_back = len(self._text) - self._num_shown
        self._window = self._window[-_MIN_WINDOW:]
        self._text = self._decode_window()
        self._num_shown = len(self._text) - num_held_back


class _ByteJoiner:
    """Group tokens so that the byte tokens of a character stay together; other bytes become U+FFFD."""

    def __init__(self, byte_of_token: Mapping[int, int]) -> None:
        self._byte_of_token = byte_of_token
        token_of_byte = {byte: token_id for token_id, byte in byte_of_token.items()}
        self._replacement = [token_of_byte[byte] for byte in _REPLACEMENT.encode()] if byte_of_token else []
        self._token_ids: list[int] = []  # the byte tokens of an incomplete character

    def feed(self, token_id: int) -> list[list[int]]:
        """Return the groups that `token_id` completes, in order."""
        if token_id not in self._byte_of_token:
            return [*self.flush(), [token_id]]
        self._token_ids.append(token_id)
        groups = []
        while self._token_ids:
            try:
                character, _ = codecs.utf_8_decode(bytes(map(self._byte_of_token.__getitem__, self._token_ids)))
            except UnicodeDecodeError:
                groups.append(self._replacement)
                del self._token_ids[0]
                continue
            if character:
                groups.append(self._token_ids)
                self._token_ids = []
            break
        return groups

    def flush(self) -> list[list[int]]:
        """Return a replacement for each byte of the incomplete character, which will not be completed."""
        groups = [self._replacement] * len(self._token_ids)
        self._token_ids = []
        return groups
