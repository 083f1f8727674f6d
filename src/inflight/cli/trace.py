"""`inflight trace RECORDING`: shows a recorded run as a table, a Chrome/Perfetto trace, a page, or a picture."""

from pathlib import Path

import click

from inflight.cli.help import Command

FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command(cls=Command)
@click.argument("recording", type=click.Path(path_type=Path))
@click.option("--chrome", type=FILE, help="Write a trace for chrome://tracing or ui.perfetto.dev (JSON).")
@click.option("--html", type=FILE, help="Write a zoomable timeline as one self-contained page.")
@click.option("--png", type=FILE, help="Write the timeline as a picture (needs matplotlib).")
def trace(recording: Path, chrome: Path | None, html: Path | None, png: Path | None) -> None:
    """Show a recorded run: a table, and timelines in files. `inflight generate --record` records one.

    Each slot has a lane with its prefills, chunks, decodes, waits and preemptions; blocks and queue are below.
    """
    from rich.console import Console

    from inflight.observe.pictures import check_pictures, save_png
    from inflight.observe.recorder import read_recording
    from inflight.observe.run_report import report_of
    from inflight.observe.trace import write_chrome_trace
    from inflight.observe.trace_page import trace_figure, write_page

    if png is not None:
        check_pictures()
    recorded = read_recording(recording)
    Console().print(report_of(recorded).table())
    if chrome is not None:
        write_chrome_trace(recorded, chrome)
    if html is not None:
        write_page(recorded, html, f"inflight: {recording.name}")
    if png is not None:
        save_png(trace_figure(recorded), png)
