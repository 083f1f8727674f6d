"""`StopStrings`: finds where a text ends because of a stop string.

Decides which stop string counts, and how much text can be shown before that is known. Knows nothing of tokens.

The stop string that counts is the one whose last character comes first; of several that end there, the longest. A
reader who checks the text after each character would stop at the same place, so the end can be acted on at once and
does not depend on how the text was cut into pieces. (vLLM checks after each token and takes the first stop string of
its list that is in the text so far: the same, except when a single token completes two.)
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one text, fed in pieces, for stop strings; buffers less than the longest of them.

    The search is Knuth, Morris and Pratt's ("Fast pattern matching in strings", 1977), with one automaton per stop
    string. The work per character is constant, however long the stop strings are. An automaton's state is the length of
    the stop string's beginning with which the text ends, which is exactly what must be held back.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """Raise ValueError for an empty stop string, which every text contains, and for a bare string."""
        if isinstance(stop, str) or "" in stop:
            raise ValueError(f"stop strings must be a list of strings that are not empty, not {stop!r}")
        self._automata = [_Automaton(text) for text in dict.fromkeys(stop)]
        self._include_stop_str_in_output = include_stop_str_in_output
        self._held_back = ""
        self._hit: str | None = None

    def feed(self, delta: str) -> tuple[str, str | None]:
        """Return the text that is safe to show after `delta`, and the stop string that has ended the text, if any.

        The text is cut right before the stop string, or right after it with `include_stop_str_in_output`. Once the text
        has ended, nothing more is shown.
        """
        if self._hit is not None:
            return "", self._hit
        text = self._held_back + delta
        for end, character in enumerate(delta, start=len(self._held_back) + 1):
            completed = [automaton.text for automaton in self._automata if automaton.advance(character)]
            if completed:
                self._hit = max(completed, key=len)
                self._held_back = ""
                return text[: end if self._include_stop_str_in_output else end - len(self._hit)], self._hit
        num_safe = len(text) - max((automaton.num_matched for automaton in self._automata), default=0)
        self._held_back = text[num_safe:]
        return text[:num_safe], None

    def flush(self) -> str:
        """Return what was held back, for a text that has ended without a stop string."""
        text, self._held_back = self._held_back, ""
        for automaton in self._automata:
            automaton.num_matched = 0
        return text


class _Automaton:
    """Tracks with how much of the beginning of `text` the characters seen so far end."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        # For each length of a beginning of `text`: the longest shorter beginning that it ends with.
        self._fallback = [0]
        for character in text[1:]:
            self._fallback.append(self._next(self._fallback[-1], character))

    def advance(self, character: str) -> bool:
        """Take one character; return True when it completes `text`, after which the automaton is not used again."""
        self.num_matched = self._next(self.num_matched, character)
        return self.num_matched == len(self.text)

    def _next(self, num_matched: int, character: str) -> int:
        while num_matched and self.text[num_matched] != character:
            num_matched = self._fallback[num_matched - 1]
        return num_matched + (self.text[num_matched] == character)
