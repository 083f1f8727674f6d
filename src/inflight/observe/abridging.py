"""What of a long axis is drawn where there is little room: beginnings and ends. Pure arithmetic.

An axis is made of groups (sequences), a group of stretches (its cached keys and its new ones, say): each stretch that
does not fit is cut in its middle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SMALLEST = 3
"""Places that a cut stretch takes at least: its first entry, the mark of the cut, its last."""


@dataclass(frozen=True, slots=True)
class Place:
    """One drawn place of an axis: entry `index` of `group`, or the mark of a cut that hides so many from there on."""

    group: int
    index: int
    num_hidden: int = 0


def fit(groups: Sequence[Sequence[int]], available: int, gap: int = 0) -> list[Place]:
    """The places at which groups of stretches of these lengths are drawn in `available` places.

    Room is shared out like water: no stretch gets more than it needs, and those that are cut get the same. Groups for
    which there is no room even so are left out, the last ones first.

    Args:
        gap: places that are kept free between two groups.
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
    """How many of the groups, from the first, can be drawn with at least the ends of their stretches."""
    needed = -gap
    for number, group in enumerate(groups):
        needed += gap + sum(min(length, SMALLEST) for length in group)
        if needed > available:
            return number
    return len(groups)


def share_out(lengths: Sequence[int], available: int) -> list[int]:
    """A width for each: its length where that is no more than a fair share of what the shorter ones leave."""
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
