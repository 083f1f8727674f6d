"""`Lanes`: the slots of a short run, a letter for each step, for a terminal or a page."""

from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from inflight.contracts.record import SpanKind
from inflight.observe.step_view import COLOURS, sequence_label

LABEL = 9
"""Columns before the first step."""

Holder = tuple[int, SpanKind]
"""A sequence's number, and its work."""


class Lanes:
    """The sequence in each slot and step: a capital letter for a prefill, a small one for a decode.

    Attributes:
        marked: the numbers of steps that are marked below the lanes.
    """

    def __init__(self) -> None:
        self.marked: Sequence[int] = ()
        self._steps: list[Mapping[int, Holder]] = []
        self._waiting: list[int] = []

    def add(self, holders: Mapping[int, Holder], num_waiting: int) -> None:
        """Add a step: each slot's work, and the number of waiting sequences."""
        self._steps.append(holders)
        self._waiting.append(num_waiting)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = max(options.max_width - LABEL, 1)
        first = max(len(self._steps) - room, 0)
        shown = range(first, len(self._steps))
        since = f" from step {first} on" if first else ""
        yield Text(f"the slots, step by step{since} (A prefill, a decode)", style="dim")
        for slot in range(1 + max((max(step, default=-1) for step in self._steps), default=-1)):
            line = _line(f"slot {slot}")
            for number in shown:
                line.append(*_mark(self._steps[number].get(slot)))
            yield line
        if any(self._waiting):
            digits = "".join(" " if count == 0 else str(count) if count < 10 else "+" for count in self._waiting)
            yield _line("waiting").append(digits[first:], style="dim")
        if self.marked:
            yield _line("shown").append("".join("^" if number in self.marked else " " for number in shown).rstrip())


def _line(name: str) -> Text:
    return Text(f"{name:{LABEL}}", style="dim", no_wrap=True, overflow="crop")


def _mark(holder: Holder | None) -> tuple[str, str]:
    if holder is None:
        return " ", ""
    number, kind = holder
    letter = sequence_label(number)[-1]
    colour = COLOURS[number % len(COLOURS)]
    return (letter.lower(), colour) if kind == "decode" else (letter, f"bold {colour}")
