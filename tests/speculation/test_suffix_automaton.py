"""The automaton against a search through the whole text."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from inflight.speculation.suffix_automaton import Cursor, SuffixAutomaton

texts = st.lists(st.integers(0, 2), max_size=60) | st.lists(st.integers(0, 1000), max_size=60)


def longest_earlier(text: list[int]) -> int:
    """The length of the longest suffix that also ends before the end."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[-length:]
        if any(text[end - length : end] == suffix for end in range(length, len(text))):
            return length
    return 0


def longest_common(text: list[int], other: list[int]) -> int:
    """The length of the longest suffix of `other` that occurs in `text`."""
    for length in range(min(len(other), len(text)), 0, -1):
        suffix = other[-length:]
        if any(text[start : start + length] == suffix for start in range(len(text) - length + 1)):
            return length
    return 0


@settings(max_examples=300)
@given(texts)
@example([0] * 20)
@example([0, 1, 0, 1, 1, 0, 1, 0, 0, 1])
def test_the_longest_suffix_that_occurred_before_is_known_after_every_token(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end, token_id in enumerate(text, 1):
        automaton.append(token_id)
        length, earlier_end = automaton.last_occurrence()
        assert length == longest_earlier(text[:end])
        if length:
            assert earlier_end < end
            assert text[earlier_end - length : earlier_end] == text[end - length : end]
    assert automaton.token_ids.tolist() == text


@settings(max_examples=300)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=80))
def test_a_cursor_follows_another_text_while_the_automaton_grows(moves: list[tuple[bool, int]]) -> None:
    automaton, text, other = SuffixAutomaton(), list[int](), list[int]()
    cursor, longest = Cursor(automaton), 0
    for is_own, token_id in moves:
        if is_own:
            automaton.append(token_id)
            text.append(token_id)
        else:
            cursor.advance(token_id)
            other.append(token_id)
            longest = min(longest + 1, longest_common(text, other))  # it does not look back when the text grows
            length, end = cursor.last_occurrence()
            assert length == longest
            assert text[end - length : end] == other[len(other) - length :]


def test_the_latest_of_several_occurrences_goes_on() -> None:
    automaton = SuffixAutomaton()
    for token_id in [1, 2, 3, 1, 2, 4, 1, 2]:
        automaton.append(token_id)
    assert automaton.last_occurrence() == (2, 5)
