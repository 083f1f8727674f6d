"""`SuffixAutomaton`: finds earlier occurrences of a growing text's last tokens, without a search.

The automaton of all substrings (Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985),
built token by token in constant amortised time. A state stands for substrings that end at the same places; its link
leads to the longest of their suffixes that ends at more. So the link of the state of the whole text is the longest
suffix that occurred before. Most states have one transition: it lies in two arrays, only further ones in a dictionary.
"""

from array import array

ROOT = 0
NONE = -1


class SuffixAutomaton:
    """A text that grows at its end. Tokens are 32-bit integers other than -1.

    Attributes:
        token_ids: the text.
    """

    def __init__(self) -> None:
        self.token_ids = array("i")
        self._last = ROOT
        self._lengths = array("i", [0])  # of the longest substring of each state
        self._links = array("i", [NONE])
        self._ends = array("i", [0])  # the position after an earlier occurrence of each state, seldom not the latest
        self._first_tokens = array("i", [NONE])  # each state's first transition
        self._first_targets = array("i", [NONE])
        self._others: dict[int, dict[int, int]] = {}

    def append(self, token_id: int) -> None:
        """Add a token at the end."""
        links, lengths = self._links, self._lengths
        num_before = len(self.token_ids)
        self._ends[max(ROOT, links[self._last])] = num_before  # what recurs there is an earlier occurrence from now on
        self.token_ids.append(token_id)
        new = self._add_state(num_before + 1, ROOT, num_before + 1)
        state = self._last
        while state != NONE and (target := self._target(state, token_id)) == NONE:
            self._set_target(state, token_id, new)
            state = links[state]
        if state != NONE:
            links[new] = target if lengths[target] == lengths[state] + 1 else self._split(state, token_id, target)
        self._last = new

    def last_occurrence(self) -> tuple[int, int]:
        """The longest suffix of the text that occurred earlier: its length, and the position after an earlier
        occurrence, usually the latest. Length 0 if its last token is new."""
        suffix = self._links[self._last]
        return (0, 0) if suffix <= ROOT else (self._lengths[suffix], self._ends[suffix])

    def _split(self, state: int, token_id: int, target: int) -> int:
        """Split `target`: the substrings that end at the end of the text get their own state."""
        clone = self._add_state(self._lengths[state] + 1, self._links[target], self._ends[target])
        self._first_tokens[clone], self._first_targets[clone] = self._first_tokens[target], self._first_targets[target]
        if (others := self._others.get(target)) is not None:
            self._others[clone] = dict(others)
        while state != NONE and self._target(state, token_id) == target:
            self._set_target(state, token_id, clone)
            state = self._links[state]
        self._links[target] = clone
        return clone

    def _add_state(self, length: int, link: int, end: int) -> int:
        self._lengths.append(length)
        self._links.append(link)
        self._ends.append(end)
        self._first_tokens.append(NONE)
        self._first_targets.append(NONE)
        return len(self._lengths) - 1

    def _target(self, state: int, token_id: int) -> int:
        if self._first_tokens[state] == token_id:
            return self._first_targets[state]
        others = self._others.get(state)
        return NONE if others is None else others.get(token_id, NONE)

    def _set_target(self, state: int, token_id: int, target: int) -> None:
        if self._first_tokens[state] in (NONE, token_id):
            self._first_tokens[state], self._first_targets[state] = token_id, target
        else:
            self._others.setdefault(state, {})[token_id] = target


class Cursor:
    """A place in an automaton that tracks another text: the longest suffix of that text found in the automaton's."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self._state = ROOT
        self._length = 0

    def advance(self, token_id: int) -> None:
        """Advance by one token of the other text."""
        automaton = self.automaton
        self._settle()
        while (target := automaton._target(self._state, token_id)) == NONE and self._state != ROOT:
            self._state = automaton._links[self._state]
            self._length = automaton._lengths[self._state]
        if target != NONE:
            self._state, self._length = target, self._length + 1

    def last_occurrence(self) -> tuple[int, int]:
        """The length of the suffix, and the position after an occurrence of it in the automaton's text."""
        self._settle()
        return self._length, self.automaton._ends[self._state]

    def _settle(self) -> None:
        """Move to the state of the suffix: states may have been split since the last call."""
        links, lengths = self.automaton._links, self.automaton._lengths
        while self._state != ROOT and self._length <= lengths[links[self._state]]:
            self._state = links[self._state]
