"""Stop strings are found where a plain search of the whole text finds them, for any split of the text."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.text import StopStrings

stop_lists = st.lists(st.text("ab😀", min_size=1, max_size=5), max_size=4)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)])]


def first_stop(text: str, stop: list[str]) -> tuple[int, str] | None:
    """The start and the text of the stop string that ends first (of several, the longest), by plain search."""
    found = [(text.find(string) + len(string), text.find(string), string) for string in stop if string in text]
    return min(found)[1:] if found else None


@given(text=st.text("abc😀", max_size=40), stop=stop_lists, cuts=st.lists(st.integers(0, 40)), include=st.booleans())
def test_results_equal_a_plain_search(text: str, stop: list[str], cuts: list[int], include: bool) -> None:
    stops = StopStrings(stop, include)
    shown, hit, fed = "", None, ""
    for piece in pieces_of(text, cuts):
        safe, hit = stops.feed(piece)
        shown, fed = shown + safe, fed + piece
        if hit is not None:
            break
        beginnings = [n for n in range(len(fed) + 1) if any(s.startswith(fed[len(fed) - n :]) for s in stop)]
        assert fed[len(shown) :] == fed[len(fed) - max(beginnings, default=0) :], "held back what must be, no more"
    shown += stops.flush()
    expected = first_stop(text, stop)
    if expected is None:
        assert (shown, hit) == (text, None)
    else:
        begin, string = expected
        assert (shown, hit) == (text[: begin + len(string) * include], string)


def test_stop_strings_are_found_across_pieces() -> None:
    stops = StopStrings(["</end>", "\n\n"])
    assert [stops.feed(piece) for piece in ["one <", "/e", "nd <", "/en", "d> two"]] == [
        ("one ", None),
        ("", None),
        ("</end ", None),
        ("", None),
        ("", "</end>"),
    ]
    assert stops.feed("three") == ("", "</end>")
    assert stops.flush() == ""


def test_the_first_complete_stop_string_counts_and_of_several_the_longest() -> None:
    assert StopStrings(["abcd", "c"]).feed("xabcd") == ("xab", "c")
    assert StopStrings(["c", "abc"]).feed("xabcd") == ("x", "abc")
    assert StopStrings(["ab", "a"]).feed("xab") == ("x", "a")


def test_flush_clears_held_back_text() -> None:
    stops = StopStrings(["ab"])
    assert (stops.feed("a"), stops.flush(), stops.flush()) == (("", None), "a", "")
    assert stops.feed("b") == ("b", None)


def test_a_hostile_stop_string_does_not_slow_a_long_stream() -> None:
    stops = StopStrings(["a" * 20_000 + "b"])  # each piece could begin it: comparing all of it again would take minutes
    num_shown = sum(len(stops.feed("aaaa")[0]) for _ in range(25_000))
    assert num_shown == 80_000
    assert stops.feed("b") == ("", "a" * 20_000 + "b")


@pytest.mark.parametrize("stop", [[""], ["a", ""], "abc"])
def test_invalid_stop_strings_are_refused(stop: list[str]) -> None:
    with pytest.raises(ValueError, match="stop strings must be a list of strings that are not empty"):
        StopStrings(stop)
