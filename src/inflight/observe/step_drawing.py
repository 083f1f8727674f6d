"""`StepDrawing`: a `StepView` in letters and colours, for a terminal or an HTML page, abridged to fit.

Abridges a long axis for a small drawing, keeping beginnings and ends. Pure arithmetic.

An axis consists of groups (sequences), and a group of stretches (such as its cached and its new keys). Each stretch
that does not fit is cut in its middle.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from inflight.observe.step_view import MaskView, SpanView, StepView

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
    """Yield each column and what is drawn before it: a space where another sequence begins."""
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
