"""`StepDrawing`: a `StepView` in letters and colours, for a terminal or an HTML page, abridged to fit.

Abridges a long axis for a small drawing, keeping beginnings and ends. Pure arithmetic.

An axis consists of groups (sequences), and a group of stretches (such as its cached and its new keys). Each stretch
that does not fit is cut in its middle.

`step_figure`: the masks of a `StepView` as a picture. It needs matplotlib, but only when called.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from inflight.observe.pictures import new_figure
from inflight.observe.step_view import MaskView, SpanView, StepView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


CELL = 0.2
"""Inches per cell, as long as there are few cells."""

MAX_NAMED = 64
"""Up to this many rows or columns are labelled with their tokens; more are labelled with their sequences only."""

MAX_TOKEN = 14
CACHED, OWN, OTHER = 0.45, 0.1, 0.0
"""How much of its sequence's colour a cell has: a visible cached key, an invisible key of the same sequence, a key of
another sequence. A visible new key has all of it."""


def step_figure(*views: StepView) -> "Figure":
    """Draw the masks of steps below each other: rows are the tokens fed, columns are the keys.

    Raises:
        ValueError: matplotlib is not installed.
    """
    drawn = [(view, mask) for view in views for mask in view.masks]
    width = np.clip(max(view.total_q + view.total_kv for view in views) * CELL, 6.5, 16)
    heights = [np.clip(view.total_q * CELL, 1, 16) + 1.7 for view, _ in drawn]
    figure = new_figure(width + 1.5, sum(heights) + 0.5 + 0.4 * len(views))
    titles = [f"step {view.step}: {view.sizes}\n{view.handovers or view.agreement}" for view in views]
    if len(views) == 1:
        figure.suptitle(titles[0], fontsize=9)
    rows = figure.subplots(len(drawn), squeeze=False, gridspec_kw={"height_ratios": heights}).flat
    for axes, (view, mask) in zip(rows, drawn, strict=True):
        _draw(axes, view, mask)
        if len(views) > 1:
            axes.set_title(f"{titles[views.index(view)]}\n{mask.heading}", fontsize=9, loc="left")
    _add_legend(figure)
    return figure


def _draw(axes: "Axes", view: StepView, mask: MaskView) -> None:
    spans, num_queries, num_keys = view.spans, view.total_q, view.total_q + view.total_kv
    axes.imshow(_colours(view, mask), interpolation="nearest", aspect="auto")
    names, row_middles, column_middles = [], [], []
    row = column = -0.5  # cell edges are at halves
    for span in spans:
        axes.hlines(row, -0.5, num_keys - 0.5, color="black", linewidth=0.8)
        axes.vlines(column, -0.5, num_queries - 0.5, color="black", linewidth=0.8)
        if span.num_cached:
            axes.vlines(column + span.num_cached, row, row + len(span.tokens), color="black", linestyle=":")
        names.append(f"{span.letter} {span.label}")
        row_middles.append(row + len(span.tokens) / 2)
        column_middles.append(column + len(span.keys) / 2)
        row, column = row + len(span.tokens), column + len(span.keys)
    above = axes.secondary_xaxis("top")
    above.set_xticks(column_middles, names, fontsize=8, rotation=30, ha="left")
    axes.set_xticks([])
    axes.set_yticks(row_middles, names, fontsize=8)
    if num_queries <= MAX_NAMED:
        labels = [f"{span.letter}  {_short(token)}" for span in spans for token in span.tokens]
        axes.set_yticks(range(num_queries), labels, fontsize=7, parse_math=False)
    if num_keys <= MAX_NAMED:
        labels = [_short(token) for span in spans for token in span.keys]
        axes.set_xticks(range(num_keys), labels, fontsize=7, rotation=90, parse_math=False)
        axes.set_xticks(np.arange(num_keys) - 0.5, minor=True)
        axes.set_yticks(np.arange(num_queries) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="both", length=0)
    axes.set_title(mask.heading, fontsize=9, loc="left")


def _colours(view: StepView, mask: MaskView) -> npt.NDArray[np.float64]:
    """Return RGB values `[T, K, 3]` float64 in [0, 1]: white, mixed with a share of the column's colour."""
    share = np.full(mask.allowed.shape, OTHER)
    colours = np.empty((mask.allowed.shape[1], 3))
    row = column = 0
    for span in view.spans:
        rows, columns = slice(row, row + len(span.tokens)), slice(column, column + len(span.keys))
        is_cached = np.arange(len(span.keys)) < span.num_cached
        share[rows, columns] = np.where(mask.allowed[rows, columns], np.where(is_cached, CACHED, 1.0), OWN)
        colours[columns] = [int(span.colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        row, column = rows.stop, columns.stop
    return 1 - share[:, :, None] * (1 - colours)


def _add_legend(figure: "Figure") -> None:
    from matplotlib.patches import Patch

    shades = (("may attend: cached key", CACHED), ("new key", 1.0), ("may not: later or too far", OWN))
    patches = [Patch(facecolor=str(1 - 0.7 * share), edgecolor="grey", label=name) for name, share in shades]
    patches.append(Patch(facecolor="white", edgecolor="grey", label="another sequence's"))
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _short(token: str) -> str:
    return token if len(token) <= MAX_TOKEN else token[: MAX_TOKEN - 1] + "…"


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


TERMINAL_ROWS = 40
MAX_LABEL = 18
LEGEND = "# may attend   . may not   c cached key   n new key   … ⋮ cut out"


class StepDrawing:
    """A step for `rich`: its sequences with their tokens, and the masks of which tokens attend to which.

    Args:
        view: the step.
        max_rows: most rows of a mask, and most tokens of a sequence, that are drawn.
    """

    def __init__(self, view: StepView, max_rows: int = TERMINAL_ROWS) -> None:
        self._view = view
        self._max_rows = max_rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view = self._view
        waiting = f"; {view.num_waiting} waiting" if view.num_waiting else ""
        yield Text(f"step {view.step}: {view.sizes}{waiting}", style="bold")
        if view.handovers:
            yield Text(view.handovers)
        yield self._sequences()
        yield Text(f"\n{LEGEND}", style="dim")
        for mask in view.masks:
            yield Text(f"\nmask of {mask.heading}", style="bold")
            for line in self._mask(mask, options.max_width):
                line.no_wrap, line.overflow = True, "crop"
                yield line
        yield Text(f"\n{view.agreement}")

    def _sequences(self) -> Table:
        """Return a table with one row per sequence: its letter, its work, and its tokens in the packed row."""
        table = Table.grid(padding=(0, 2))
        for _ in range(4):
            table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for span in self._view.spans:
            places = abridge([[len(span.tokens)]], self._max_rows)
            words = [f"… {p.num_hidden} more …" if p.num_hidden else span.tokens[p.index] for p in places]
            table.add_row(
                Text(span.letter, style=f"bold {span.colour}"),
                Text(span.label, style=span.colour),
                Text(f"slot {span.slot}", style="dim"),
                Text(f"{span.num_cached} cached", style="dim"),
                Text(" ".join(words), style=span.colour),
            )
        return table

    # --------------------------------------------------------------------------------------- the mask

    def _mask(self, mask: MaskView, width: int) -> Iterator[Text]:
        """Yield two header lines, then a line for each token of the packed row."""
        spans = self._view.spans
        label_width = self._label_width(width)
        queries = [[len(span.tokens)] for span in spans]
        keys = [[span.num_cached, len(span.tokens)] for span in spans]
        room = width - label_width
        num_shown = min(num_that_fit(queries, self._max_rows), num_that_fit(keys, room, gap=1))
        rows, columns = abridge(queries[:num_shown], self._max_rows), abridge(keys[:num_shown], room, gap=1)
        first_rows = [sum(map(sum, queries[:number])) for number in range(num_shown)]
        first_columns = [sum(map(sum, keys[:number])) for number in range(num_shown)]
        yield from self._headings(columns, label_width)
        for row in rows:
            span = spans[row.group]
            if row.num_hidden:
                yield _label(span, "⋮", label_width).append(f"⋮ {row.num_hidden} more tokens", style="dim")
                continue
            line = _label(span, span.tokens[row.index], label_width)
            for column, gap in _with_gaps(columns):
                cell = (first_rows[row.group] + row.index, first_columns[column.group] + column.index)
                line.append(gap).append(*_cell(column, spans[column.group], bool(mask.allowed[cell])))
            yield line
        if num_shown < len(spans):
            yield Text(f"⋮ no room here for {len(spans) - num_shown} of {len(spans)} sequences", style="dim")

    def _headings(self, columns: list[Place], label_width: int) -> Iterator[Text]:
        """Yield the header lines: which sequence each column belongs to, and whether its key was cached."""
        names, ages = Text(" " * label_width), Text(" " * label_width)
        for group in dict.fromkeys(column.group for column in columns):
            span, width = self._view.spans[group], sum(column.group == group for column in columns)
            names.append(f"{span.letter:{width}.{width}} ", style=f"bold {span.colour}")
        for column, gap in _with_gaps(columns):
            span = self._view.spans[column.group]
            age = "…" if column.num_hidden else "c" if column.index < span.num_cached else "n"
            ages.append(gap).append(age, style="dim")
        yield names
        yield ages

    def _label_width(self, width: int) -> int:
        """Return the width for a letter and a token before each row, and a space after them."""
        widest = max(cell_len(f"{span.letter} {token} ") for span in self._view.spans for token in span.tokens)
        return min(widest, MAX_LABEL, width // 3)


def _with_gaps(columns: list[Place]) -> Iterator[tuple[Place, str]]:
    """Yield each column and its separator: a space where another sequence begins."""
    group = 0
    for column in columns:
        yield column, "" if column.group == group else " "
        group = column.group


def _label(span: SpanView, token: str, width: int) -> Text:
    label = f"{span.letter} {token}"
    if cell_len(label) >= width:
        label = set_cell_size(label, width - 2) + "…"
    return Text().append(set_cell_size(label, width), style=span.colour)


def _cell(column: Place, span: SpanView, allowed: bool) -> tuple[str, str]:
    """Return the character of a cell of the mask, and its style."""
    if column.num_hidden:
        return "…", "dim"
    if not allowed:
        return ".", "dim"
    return "#", span.colour if column.index < span.num_cached else f"bold {span.colour}"
