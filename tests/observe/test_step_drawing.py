"""A printed step: every cell of the mask is in its place, and nothing is wider than the terminal."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console

from inflight.observe.pictures import to_html
from inflight.observe.step_drawing import StepDrawing
from inflight.observe.step_view import StepView
from tests.observe.steps import captured


def lines_of(view: StepView, width: int = 200, max_rows: int = 40) -> list[str]:
    console = Console(width=width, file=StringIO())
    console.print(StepDrawing(view, max_rows))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def cells_of(lines: list[str]) -> list[str]:
    """The rows of the masks without labels and gaps."""
    rows = [re.fullmatch(r"[A-Z]+ \S+ +([#.… ]+)", line) for line in lines]
    return [row[1].replace(" ", "") for row in rows if row]


def test_an_uncut_drawing_shows_every_cell_of_the_mask() -> None:
    view = captured()
    lines = lines_of(view)
    expected = ["".join("#" if cell else "." for cell in row) for row in view.masks[0].allowed]
    assert cells_of(lines) == expected
    assert lines[0] == "step 1: total_q 10 fed, total_kv 10 cached: 10 queries over 20 keys"
    assert "B  PREFILL(2)  slot 1  7 cached  17 18" in map(str.rstrip, lines)
    heading = next(number for number, line in enumerate(lines) if line.startswith("mask of"))
    assert lines[heading + 1].split() == ["A", "B", "C"]
    assert lines[heading + 2].split() == ["cccn", "cccccccnn", "nnnnnnn"]
    assert lines[heading + 3].startswith("A ")
    assert lines[-1] == view.agreement


def test_each_window_has_its_own_drawing() -> None:
    view = captured(step=3, name="gemma3")
    expected = ["".join("#" if c else "." for c in row) for mask in view.masks for row in mask.allowed]
    assert cells_of(lines_of(view)) == expected
    assert expected[: view.total_q] != expected[view.total_q :]


@pytest.mark.parametrize("width", [24, 40, 61, 80, 120])
@pytest.mark.parametrize("step", [0, 1, 4])
@pytest.mark.thorough("0-24", "1-80")
def test_a_drawing_never_exceeds_the_terminal_width_or_the_requested_height(width: int, step: int) -> None:
    prompts = [list(range(1, 1 + length)) for length in (3, 70, 2, 30, 1, 90, 5)]
    view = captured(prompts, step, max_num_batched_tokens=100)
    lines = lines_of(view, width, max_rows=25)
    assert max(map(cell_len, lines)) <= width
    assert 0 < len(cells_of(lines)) <= 25


def test_a_cut_drawing_shows_the_ends_of_each_stretch() -> None:
    view = captured([list(range(60)), [1, 2, 3], list(range(100, 180))], step=1, max_num_batched_tokens=70)
    assert [span.label for span in view.spans] == ["decode(1)", "decode(1)", "chunk(68)"]
    lines = lines_of(view, width=60, max_rows=12)
    heading = next(number for number, line in enumerate(lines) if line.startswith("mask of"))
    ages = lines[heading + 2].split()
    assert re.fullmatch(r"c+…c+n", ages[0])
    assert ages[1] == "cccn"
    assert re.fullmatch(r"c+n+…n+", ages[2])
    assert any(re.match(r"C ⋮ +⋮ \d+ more tokens", line) for line in lines)
    assert "more …" in "".join(lines[:heading])
    assert cells_of(lines)[-1].endswith("#" * len(ages[2].partition("…")[2]))


def test_sequences_without_room_are_counted() -> None:
    view = captured([[n] * 5 for n in range(1, 13)], step=1, max_num_batched_tokens=100)
    lines = lines_of(view, width=40)
    num_shown = len(cells_of(lines))
    assert 0 < num_shown < 12
    assert f"⋮ no room here for {12 - num_shown} of 12 sequences" in lines


def test_token_text_is_never_interpreted_as_markup() -> None:
    view = captured()
    span = replace(view.spans[0], keys=("[bold]", "[/]", "<b>", "[red]字&字字字字字字字字字字"))
    view = replace(view, spans=(span, *view.spans[1:]))
    lines = lines_of(view)
    assert any("[red]字" in line for line in lines)
    assert "[red]字&amp;字" in to_html(StepDrawing(view), 200)


def test_a_terminal_gets_colours() -> None:
    console = Console(width=100, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(StepDrawing(captured()))
    assert "\x1b[" in console.file.getvalue()  # type: ignore[attr-defined]
