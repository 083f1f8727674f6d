"""Draws timelines: one panel per method, slots down, steps across, on one scale. Needs the extra `pictures`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from inflight.observe.pictures import new_figure
from inflight.observe.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

USES = ("idle", "prefill", "decode", "decode of the next request", "padding")
COLOURS = ("#ffffff", "#e8a33d", "#2f8f5b", "#7fc79b", "#d9d9d9")


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
