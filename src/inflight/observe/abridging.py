"""Abridges a long axis for a small drawing, keeping beginnings and ends. Pure arithmetic.

An axis consists of groups (sequences), and a group of stretches (such as its cached and its new keys). Each stretch
that does not fit is cut in its middle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SMALLEST = 3
"""The fewest places of a cut stretch: its first entry, the mark of the cut, its last entry."""


@dataclass(frozen=True, slots=True)
class Place:
    """A drawn place of an axis: entry `index` of `group`, or a mark that hides `num_hidden` entries from there on."""

    group: int
    index: int
    num_hidden: int = 0


def abridge(groups: Sequence[Sequence[int]], available: int, gap: int = 0) -> list[Place]:
    """Return the places to draw, at most `available`, for groups of stretches of these lengths.

    No stretch gets more room than it needs, and all that are cut get the same. Groups for which there is still no room
    are left out, the last ones first.

    Args:
        gap: places that are left free between two groups.
    """
    groups = groups[: num_that_fit(groups, available, gap)]
    room = available - gap * (len(groups) - 1)
    widths = iter(share_out([length for group in groups for length in group], room))
    places: list[Place] = []
    for number, group in enumerate(groups):
        first = 0
        for length in group:
            places += _cut(number, first, length, next(widths))
            first += length
    return places


def num_that_fit(groups: Sequence[Sequence[int]], available: int, gap: int = 0) -> int:
    """Return how many groups, from the first, can be drawn with at least the ends of their stretches."""
    needed = -gap
    for number, group in enumerate(groups):
        needed += gap + sum(min(length, SMALLEST) for length in group)
        if needed > available:
            return number
    return len(groups)


def share_out(lengths: Sequence[int], available: int) -> list[int]:
    """Return a width for each length: the length itself, if it is at most a fair share of what shorter ones leave."""
    widths = [0] * len(lengths)
    for rank, number in enumerate(sorted(range(len(lengths)), key=lengths.__getitem__)):
        widths[number] = min(lengths[number], available // (len(lengths) - rank))
        available -= widths[number]
    return widths


def _cut(group: int, first: int, length: int, width: int) -> Iterator[Place]:
    if width == length:
        yield from (Place(group, index) for index in range(first, first + length))
        return
    num_before, num_after = width // 2, (width - 1) // 2
    yield from (Place(group, index) for index in range(first, first + num_before))
    yield Place(group, first + num_before, num_hidden=length - num_before - num_after)
    yield from (Place(group, index) for index in range(first + length - num_after, first + length))
