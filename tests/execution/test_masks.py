"""Which query may attend to which key: positions, windows and chunks, drawn as text."""

from array import array

import torch
from torch import Tensor

from inflight.execution.attention.reference import may_attend, ragged_mask
from tests.execution.paged_world import Part, World


def drawn(mask: Tensor) -> list[str]:
    """A mask as text with one row per query; `#` marks each key that the query may see."""
    return ["".join("#" if visible else "." for visible in row) for row in mask.tolist()]


def test_a_query_sees_itself_and_earlier_tokens() -> None:
    assert drawn(may_attend(torch.arange(4), torch.arange(4))) == [
        "#...",
        "##..",
        "###.",
        "####",
    ]


def test_a_window_counts_the_query_itself() -> None:
    assert drawn(may_attend(torch.arange(2, 6), torch.arange(6), window=2)) == [
        ".##...",
        "..##..",
        "...##.",
        "....##",
    ]
    assert drawn(may_attend(torch.arange(3), torch.arange(3), window=1)) == ["#..", ".#.", "..#"]


def test_chunks_are_aligned_to_the_sequence() -> None:
    assert drawn(may_attend(torch.arange(1, 7), torch.arange(7), chunk=3)) == [
        "##.....",
        "###....",
        "...#...",
        "...##..",
        "...###.",
        "......#",
    ]


def test_window_and_chunk_can_be_combined() -> None:
    assert drawn(may_attend(torch.arange(6), torch.arange(6), window=2, chunk=4)) == [
        "#.....",
        "##....",
        ".##...",
        "..##..",
        "....#.",
        "....##",
    ]


def test_may_attend_takes_batches_of_positions() -> None:
    mask = may_attend(torch.tensor([[3], [1]]), torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]]), window=3)
    assert [drawn(each) for each in mask] == [[".###"], ["##.."]]


RAGGED = World(4, ((Part(0, 2, 4), Part(1, 0, 3), Part(2, 4, 5)),), (0, 1, 2), ((array("i", [0, 1]),) * 3,))
"""The last two tokens of a prompt of four, a prompt of three, and a decode after four tokens."""


def test_the_ragged_mask_keeps_sequences_apart() -> None:
    assert drawn(ragged_mask(RAGGED.batch(RAGGED.steps[0]))) == [
        "###.........",
        "####........",
        "....#.......",
        "....##......",
        "....###.....",
        ".......#####",
    ]


def test_the_ragged_mask_supports_windows_and_chunks() -> None:
    assert drawn(ragged_mask(RAGGED.batch(RAGGED.steps[0]), window=2)) == [
        ".##.........",
        "..##........",
        "....#.......",
        "....##......",
        ".....##.....",
        "..........##",
    ]
    assert drawn(ragged_mask(RAGGED.batch(RAGGED.steps[0]), chunk=2)) == [
        "..#.........",
        "..##........",
        "....#.......",
        "....##......",
        "......#.....",
        "...........#",
    ]
