"""`Timeline`: the request in each slot and step of a run, drawn for a terminal.

Slots go down, steps across. Knows neither models nor requests, only numbers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

SlotUse: TypeAlias = Literal["prefill", "decode", "padding"]
"""The uses of a slot in a step; "padding" is wasted work."""

MARKS = {"prefill": ("█", "yellow"), "decode": ("▄", "green"), "padding": ("░", "red"), "idle": (" ", "default")}
"""Characters and colours; without colours the characters still differ."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One slot's work in one step.

    Attributes:
        request: the request that held the slot.
        use: the slot's work.
        num_tokens: how many tokens it fed to the model.
        num_padding: how many of those tokens were useless.
        num_keys: keys for each of its tokens, including the token's own.
        num_padding_keys: how many of those keys were masked padding, or belonged to a useless row.
    """

    request: int
    use: SlotUse
    num_tokens: int
    num_padding: int
    num_keys: int
    num_padding_keys: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps of one run, each a mapping of slot to `Lane`; a missing slot was idle. Draws itself with rich.

    Attributes:
        name: the name of the method that ran.
        num_slots: lanes to draw.
        steps: the steps so far; may still grow.
        scale: the least number of steps for the full width, so that several timelines can be compared.
    """

    name: str
    num_slots: int
    steps: Sequence[dict[int, Lane]]
    scale: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        per_column = -(-max(len(self.steps), self.scale, 1) // max(options.max_width - 4, 1))
        unit = "" if per_column == 1 else f", {per_column} in a column"
        yield Text.assemble((self.name, "bold"), f": {len(self.steps)} steps{unit}")
        for slot in range(self.num_slots):
            line = Text(f"{slot:3} ", style="dim", no_wrap=True, overflow="crop")
            for first in range(0, len(self.steps), per_column):
                mark, colour = MARKS[self._main_use(slot, first, first + per_column)]
                line.append(mark, style=colour)
            yield line

    def _main_use(self, slot: int, first: int, last: int) -> str:
        """Return a slot's main work in these steps; a prefill takes precedence."""
        uses = Counter(step[slot].use if slot in step else "idle" for step in self.steps[first:last])
        return "prefill" if "prefill" in uses else uses.most_common(1)[0][0]


def legend() -> Text:
    """Return the meaning of a timeline's marks."""
    text = Text("    ")
    for use, (mark, colour) in MARKS.items():
        text.append("(blank)" if use == "idle" else mark, style=colour).append(f" {use}   ")
    return text
