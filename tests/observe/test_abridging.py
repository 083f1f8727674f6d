"""Shortening an axis to the available width: never too wide, ends always shown, nothing cut without need."""

from hypothesis import given
from hypothesis import strategies as st

from inflight.observe.step_drawing import SMALLEST, abridge, num_that_fit, share_out

GROUPS = st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=3), min_size=1, max_size=8)


@given(groups=GROUPS, available=st.integers(0, 200), gap=st.integers(0, 2))
def test_the_drawing_fits_and_shows_the_ends_of_every_stretch(
    groups: list[list[int]], available: int, gap: int
) -> None:
    places = abridge(groups, available, gap)
    num_groups = num_that_fit(groups, available, gap)
    assert len(places) + gap * max(num_groups - 1, 0) <= available
    for number, group in enumerate(groups):
        drawn = [place for place in places if place.group == number]
        shown = [place.index for place in drawn if not place.num_hidden]
        hidden = [i for place in drawn for i in range(place.index, place.index + place.num_hidden)]
        assert sorted(shown + hidden) == (list(range(sum(group))) if number < num_groups else [])
        assert [place.index for place in drawn] == sorted(place.index for place in drawn)
        first = 0
        for length in group if number < num_groups else []:
            assert length == 0 or {first, first + length - 1} <= set(shown)
            first += length


@given(groups=GROUPS, gap=st.integers(0, 2))
def test_nothing_is_cut_if_everything_fits(groups: list[list[int]], gap: int) -> None:
    needed = sum(map(sum, groups)) + gap * (len(groups) - 1)
    assert not any(place.num_hidden for place in abridge(groups, needed, gap))


@given(groups=GROUPS)
def test_no_group_is_left_out_as_long_as_ends_fit(groups: list[list[int]]) -> None:
    needed = sum(min(length, SMALLEST) for group in groups for length in group)
    assert num_that_fit(groups, needed) == len(groups)


def test_short_stretches_are_whole_and_long_ones_share_the_rest() -> None:
    assert share_out([100, 3, 50, 0, 7], 50) == [20, 3, 20, 0, 7]
    assert share_out([100, 3, 50, 0, 7], 51) == [21, 3, 20, 0, 7]
