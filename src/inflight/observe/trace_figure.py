"""Draws a recording: one lane per slot over time, with blocks and queue below. Needs the extra `pictures`."""

from typing import TYPE_CHECKING

from inflight.observe.pictures import new_figure
from inflight.observe.recorder import Recording
from inflight.observe.trace import COLOURS, num_lanes, start_of, stretches

if TYPE_CHECKING:
    from matplotlib.figure import Figure

USED, CACHED, WAITING = "#3572b0", "#a9c7e8", "#8c8c8c"
LANE_INCHES, MOST_LANE_INCHES = 0.16, 9.0


def trace_figure(recording: Recording) -> "Figure":
    """Return the timeline of a recording. Raises `ValueError` without the extra, or if no step was recorded."""
    steps, num_slots, begin = recording.steps, num_lanes(recording), start_of(recording)
    if not steps:
        raise ValueError("the recording has no steps")
    lanes_height = min(LANE_INCHES * num_slots, MOST_LANE_INCHES) + 0.3
    figure = new_figure(12.0, lanes_height + 2.6)
    heights = [lanes_height, 0.9, 0.9]
    lanes, blocks, queue = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": heights})
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    starts = [step.start_time - begin for step in steps]
    ends = [step.start_time + step.duration - begin for step in steps]
    drawn = stretches(steps)
    for kind, colour in COLOURS.items():
        boxes = [
            [(left, top), (left, top + 0.9), (right, top + 0.9), (right, top)]
            for one in drawn
            if one.kind == kind
            for left, right, top in [(starts[one.first_step], ends[one.last_step], one.slot - 0.45)]
        ]
        lanes.add_collection(PolyCollection(boxes, facecolors=colour, edgecolors="none"))
    lost = [(starts[number], each.slot) for number, step in enumerate(steps) for each in step.preempted]
    for moment, slot in lost:
        lanes.plot([moment, moment], [slot - 0.45, slot + 0.45], color=COLOURS["preempted"], linewidth=1.2)
    lanes.set_xlim(0, ends[-1])
    lanes.set_ylim(num_slots - 0.5, -0.5)
    lanes.set_ylabel("slot", fontsize=8)
    lanes.set_title(
        f"{num_slots} of {recording.config.scheduling.max_num_seqs} slots were ever in use", loc="left", fontsize=8
    )
    lanes.yaxis.set_major_locator(MaxNLocator(integer=True))

    used = [step.num_blocks_used for step in steps]
    held = [step.num_blocks_used + step.num_blocks_cached for step in steps]
    blocks.fill_between(starts, held, step="post", color=CACHED, linewidth=0, label="cached")
    blocks.fill_between(starts, used, step="post", color=USED, linewidth=0, label="used")
    blocks.set_ylabel("blocks", fontsize=8)
    queue.fill_between(starts, [step.num_waiting for step in steps], step="post", color=WAITING, linewidth=0)
    queue.set_ylabel("waiting", fontsize=8)
    queue.set_xlabel("seconds", fontsize=8)
    for panel, values in ((blocks, held), (queue, [step.num_waiting for step in steps])):
        panel.set_ylim(0, max(1, *values) * 1.05)
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in (lanes, blocks, queue):
        panel.tick_params(labelsize=7, length=2)
        panel.spines[["top", "right"]].set_visible(False)
    colours = [*COLOURS.items(), ("blocks used", USED), ("blocks cached", CACHED)]
    patches = [Patch(facecolor=colour, label=name) for name, colour in colours]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=7, frameon=False)
    return figure
