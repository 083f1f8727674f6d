"""`SlotView`: draws the slots of a running engine for a terminal: each slot's request, its work and its text."""

from collections import defaultdict

from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from inflight.contracts.step.record import SpanRecord, StepRecord

COLOURS = {"prefill": "yellow", "chunk": "dark_orange", "decode": "green"}
WIDTH_BESIDE_TEXT = 38


class SlotView:
    """A live picture of the slots, for `rich.live.Live`; it is fed with step records and texts.

    Args:
        num_slots: lanes to draw.
        num_requests: how many requests the run has.
    """

    def __init__(self, num_slots: int, num_requests: int) -> None:
        self._lanes: list[SpanRecord | None] = [None] * num_slots
        self._texts: defaultdict[str, str] = defaultdict(str)
        self._record: StepRecord | None = None
        self._num_requests = num_requests
        self._num_finished = 0

    def observe(self, record: StepRecord) -> None:
        """Show this step."""
        self._record = record
        self._lanes = [None] * len(self._lanes)
        for span in record.spans:
            self._lanes[span.slot] = span

    def add_text(self, request_id: str, text: str) -> None:
        """Append to a request's text."""
        self._texts[request_id] += text

    def count_finished(self) -> None:
        """Count one more finished request."""
        self._num_finished += 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width - WIDTH_BESIDE_TEXT, 10)
        table = Table(box=None, pad_edge=False)
        table.add_column("slot", justify="right", style="dim")
        table.add_column("request", justify="right")
        table.add_column("this step", width=14)
        table.add_column("text", no_wrap=True, width=width)
        for slot, span in enumerate(self._lanes):
            table.add_row(str(slot), *self._cells(span, width))
        yield Panel(table, title=self._title(), title_align="left", border_style="dim")

    def _cells(self, span: SpanRecord | None, width: int) -> tuple[str, Text, str]:
        if span is None:
            return "", Text("idle", style="dim"), ""
        what = span.kind if span.kind == "decode" else f"{span.kind} {span.length}"
        if span.num_draft_tokens:
            what += f" +{span.num_accepted}/{span.num_draft_tokens}"
        text = " ".join(self._texts[span.request_id].split())
        return span.request_id, Text(what, style=COLOURS[span.kind]), text[-width:]

    def _title(self) -> str:
        record = self._record
        if record is None:
            return "starting"
        return (
            f"step {record.step}: one row of {record.num_tokens} tokens from {len(record.spans)} sequences; "
            f"{record.num_waiting} waiting, {self._num_finished} of {self._num_requests} done"
        )
