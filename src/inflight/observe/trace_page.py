"""Writes a recording as one self-contained HTML page: a zoomable timeline on a canvas, and the report.

Draws a recording: one lane per slot over time, with blocks and queue below. Needs the extra `pictures`.
"""

import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.observe.pictures import new_figure, to_html, write_html
from inflight.observe.recorder import Recording
from inflight.observe.run_report import report_of
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


SCRIPT = Path(__file__).with_name("trace_page.js")
WIDTH = 110
KINDS = list(COLOURS)


def write_page(recording: Recording, path: Path, title: str) -> None:
    """Write the page. Raises `ValueError` if it cannot be written."""
    legend = "".join(f'<span style="color:{colour}">&#9632;</span> {kind} &nbsp; ' for kind, colour in COLOURS.items())
    data = json.dumps(page_data(recording), separators=(",", ":")).replace("<", "\\u003c")
    num_slots = recording.config.scheduling.max_num_seqs
    bodies = [
        f"<p>{legend} (nothing: idle; {num_lanes(recording)} of {num_slots} slots were ever in use)"
        "<br>wheel: zoom, drag: move, double click: all</p>",
        '<canvas id="timeline" style="width:min(96vw,1800px);display:block"></canvas>\n<p id="told">&nbsp;</p>',
        to_html(report_of(recording).table(), WIDTH),
        f"<p>{escape(', '.join(f'{name} {value}' for name, value in recording.machine.items()))}</p>",
        f"<script>\nconst trace = {data};\n{SCRIPT.read_text(encoding='utf-8')}</script>",
    ]
    write_html(path, title, bodies)


def page_data(recording: Recording) -> dict[str, Any]:
    """Return the script's data: times in microseconds, everything else by step or as lists of numbers."""
    steps, begin = recording.steps, start_of(recording)
    requests: dict[str, int] = {}
    drawn = [
        [
            *(one.slot, KINDS.index(one.kind), one.first_step, one.last_step),
            *(requests.setdefault(one.request_id, len(requests)), one.start, one.num_tokens),
        ]
        for one in stretches(steps)
    ]
    return {
        "slots": num_lanes(recording),
        "kinds": KINDS,
        "colours": list(COLOURS.values()),
        "requests": list(requests),
        "stretches": drawn,
        "preemptions": [[number, each.slot] for number, step in enumerate(steps) for each in step.preempted],
        "starts": [round((step.start_time - begin) * 1e6) for step in steps],
        "ends": [round((step.start_time - begin + step.duration) * 1e6) for step in steps],
        "tokens": [step.num_tokens for step in steps],
        "used": [step.num_blocks_used for step in steps],
        "held": [step.num_blocks_used + step.num_blocks_cached for step in steps],
        "blocks": max((step.num_blocks_used + step.num_blocks_cached for step in steps), default=1),
        "waiting": [step.num_waiting for step in steps],
        "mostWaiting": max((step.num_waiting for step in steps), default=0),
    }
