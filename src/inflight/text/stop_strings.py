"""`StopStrings`: finds where a text ends because of a stop string.

Decides which stop string counts, and how much text can be shown meanwhile. Knows nothing of tokens.

The stop string that ends first counts; of several that end there, the longest. This equals a check after each
character, so it takes effect at once and does not depend on how the text was divided. (vLLM checks after each token and
takes the first stop string of its list that is in the text so far: the same, except when a single token completes two.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class StopStrings:
    """Watches one text, fed in pieces, for stop strings; buffers less than the longest of them.

    It holds back the longest suffix of the text that is a prefix of a stop string, so a complete stop string ends
    there, too. Prefixes are looked up in the sorted list of stop strings. There is no setup cost, even for many long
    stop strings and many sequences. Each character is added once and dropped at most once, each with one lookup.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        """Raise ValueError for an empty stop string, and for a bare string."""
        if isinstance(stop, str) or "" in stop:
            raise ValueError(f"stop strings must be a list of strings that are not empty, not {stop!r}")
        self._stop = tuple(sorted(set(stop)))
        self._first_characters = frozenset(each[0] for each in self._stop)
        self._include_stop_str_in_output = include_stop_str_in_output
        self._held_back = ""
        self._hit: str | None = None

    def feed(self, delta: str) -> tuple[str, str | None]:
        """Return the text that is safe to show after `delta`, and the stop string that has ended the text, if any.

        The text is cut before the stop string, or after it with `include_stop_str_in_output`. After the end, nothing
        more is returned.
        """
        if self._hit is not None:
            return "", self._hit
        if not self._held_back and self._first_characters.isdisjoint(delta):
            return delta, None
        text, begin = self._held_back + delta, 0
        for end in range(len(self._held_back) + 1, len(text) + 1):
            if text[begin:end].endswith(self._stop):
                self._hit = max(filter(text[begin:end].endswith, self._stop), key=len)
                self._held_back = ""
                return text[: end if self._include_stop_str_in_output else end - len(self._hit)], self._hit
            while begin < end and not self._is_beginning(text[begin:end]):
                begin += 1
        self._held_back = text[begin:]
        return text[:begin], None

    def flush(self) -> str:
        """Return the held-back text, for a text that ended without a stop string."""
        text, self._held_back = self._held_back, ""
        return text

    def _is_beginning(self, text: str) -> bool:
        """Whether a stop string begins with `text`."""
        index = bisect_left(self._stop, text)
        return index < len(self._stop) and self._stop[index].startswith(text)
