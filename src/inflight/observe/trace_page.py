"""Writes a recording as one self-contained HTML page: a zoomable timeline on a canvas, and the report."""

import json
from html import escape
from pathlib import Path
from typing import Any

from inflight.observe.pictures import to_html, write_html
from inflight.observe.recorder import Recording
from inflight.observe.run_report import report_of
from inflight.observe.trace import COLOURS, num_lanes, start_of, stretches

SCRIPT = Path(__file__).with_name("trace_page.js")
WIDTH = 110
KINDS = list(COLOURS)


def write_page(recording: Recording, path: Path, title: str) -> None:
    """Write the page. Raises `ValueError` if it cannot be written."""
    legend = "".join(f'<span style="color:{colour}">&#9632;</span> {kind} &nbsp; ' for kind, colour in COLOURS.items())
    data = json.dumps(page_data(recording), separators=(",", ":")).replace("<", "\\u003c")
    bodies = [
        f"<p>{legend} (nothing: idle; {num_lanes(recording)} of {recording.config.max_num_seqs} slots were ever in use)"
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
