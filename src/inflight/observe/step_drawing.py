"""`StepDrawing`: a `StepView` in letters and colours, for a terminal or an HTML page, abridged to fit."""

from collections.abc import Iterator

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from inflight.observe.abridging import Place, abridge, num_that_fit
from inflight.observe.step_view import MaskView, SpanView, StepView

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
