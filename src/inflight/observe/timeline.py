"""`Timeline`: who held which slot in which step of a run, and its drawing for a terminal.

Slots go down, steps across. Knows neither models nor requests, only numbers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

SlotUse: TypeAlias = Literal["prefill", "decode", "padding"]
"""What a slot does in a step; "padding" computes something that nobody needs."""

MARKS = {"prefill": ("█", "yellow"), "decode": ("█", "green"), "padding": ("░", "red"), "idle": (" ", "default")}


@dataclass(frozen=True, slots=True)
class Lane:
    """What one slot did in one step.

    Attributes:
        request: for whom.
        use: what it was for.
        num_tokens: places that it took among the tokens that went through the model.
        num_padding: of those, how many held nothing that anybody needs.
        num_keys: keys that lay before each of its tokens, its own included.
        num_padding_keys: of those, how many were masked padding, or a row's that nobody needs.
    """

    request: int
    use: SlotUse
    num_tokens: int
    num_padding: int
    num_keys: int
    num_padding_keys: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps of one run, each a mapping of slot to `Lane`; a slot that is missing was idle. Draws itself with rich.

    Attributes:
        name: of the method that ran.
        num_slots: lanes to draw.
        steps: what has run so far; may still grow.
        scale: steps that the full width stands for at least, so that several timelines can be compared.
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
        """What a slot mostly did in these steps; a prefill among them is always shown."""
        uses = Counter(step[slot].use if slot in step else "idle" for step in self.steps[first:last])
        return "prefill" if "prefill" in uses else uses.most_common(1)[0][0]


def legend() -> Text:
    """What the marks of a timeline mean."""
    text = Text("    ")
    for use, (mark, colour) in MARKS.items():
        text.append("(blank)" if use == "idle" else mark, style=colour).append(f" {use}   ")
    return text
