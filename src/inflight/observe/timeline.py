"""`Timeline`: the request in each slot and step of a run, drawn for a terminal.

Slots go down, steps across. Knows neither models nor requests, only numbers.

Draws timelines: one panel per method, slots down, steps across, on one scale. Needs the extra `pictures`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from inflight.observe.pictures import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


USES = ("idle", "prefill", "decode", "decode of the next request", "padding")
COLOURS = ("#ffffff", "#e8a33d", "#2f8f5b", "#7fc79b", "#d9d9d9")


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


def timeline_figure(timelines: Sequence[Timeline], subtitles: Sequence[str] = ()) -> "Figure":
    """Return a figure with one panel per timeline, titled with its name and its subtitle (such as its wall time).
    Raises `ValueError` without the extra."""
    heights = [timeline.num_slots + 3 for timeline in timelines]
    figure = new_figure(11.0, 0.16 * sum(heights) + 0.7)
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    last_step = max(len(timeline.steps) for timeline in timelines)
    for panel, timeline, subtitle in zip(panels[:, 0], timelines, subtitles or [""] * len(timelines), strict=True):
        extent = (0, len(timeline.steps), timeline.num_slots - 0.5, -0.5)
        panel.imshow(
            _cells(timeline), cmap=ListedColormap(COLOURS), vmin=0, vmax=len(USES) - 1,
            aspect="auto", interpolation="nearest", extent=extent,
        )  # fmt: skip
        title = f"{timeline.name}: {len(timeline.steps)} steps"
        panel.set_title(f"{title}, {subtitle}" if subtitle else title, loc="left", fontsize=9)
        panel.set_xlim(0, last_step)
        panel.set_yticks(range(timeline.num_slots))
        panel.tick_params(labelsize=7, length=2)
        panel.set_ylabel("slot", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("step", fontsize=8)
    patches = [Patch(facecolor=c, edgecolor="#999999", label=use) for use, c in zip(USES, COLOURS, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(USES), fontsize=7, frameon=False)
    return figure


def _cells(timeline: Timeline) -> np.ndarray:
    """Return indices into `USES`, `[num_slots, steps]` int64; a slot's requests alternate between the two greens."""
    cells = np.zeros((timeline.num_slots, len(timeline.steps)), dtype=np.int64)
    for slot in range(timeline.num_slots):
        request, parity = None, 1
        for step, lanes in enumerate(timeline.steps):
            if slot not in lanes:
                continue
            lane = lanes[slot]
            if lane.request != request:
                request, parity = lane.request, 1 - parity
            cells[slot, step] = USES.index(lane.use) + (parity if lane.use == "decode" else 0)
    return cells
