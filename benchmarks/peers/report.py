"""Shows a comparison: tables for the terminal, Markdown, JSON, and a bar chart. Decides only how it looks."""

import json
from pathlib import Path

from rich.table import Table

from benchmarks.peers.catalogue import OURS, PEERS
from benchmarks.peers.results import MEBIBYTE, CellResult, Comparison, PeerRuns, Spread

HEADINGS = (
    "",
    "tokens/s",
    "from",
    "to",
    "ours: theirs",
    "from",
    "to",
    "peak MiB",
    "TTFT p50",
    "p95 s",
    "latency p50",
    "p95 s",
)
ABOUT = """Output tokens a second over a whole run: medians of interleaved rounds. All requests are submitted at once,
greedy, EOS ignored, token counts checked. Ratios are taken round by round. Times are seconds since submission."""
FOR_FILES_ONLY = (5, 6)
"""Columns that do not fit into a terminal of 80 columns."""
COLORS = ("#d1495b", "#8d99ae", "#577590", "#43aa8b", "#f3722c", "#90be6d", "#b56576")


def rich_table(cell: CellResult) -> Table:
    """Return a workload's table, with the fastest peer first."""
    table = Table(title=_title(cell), title_justify="left", header_style="bold", box=None, pad_edge=False)
    shown = [number for number in range(len(HEADINGS)) if number not in FOR_FILES_ONLY]
    for number in shown:  # narrow columns: the words of each heading are below each other
        heading = HEADINGS[number].replace(" ", "\n")
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for runs in _fastest_first(cell):
        values = [runs.peer, *_row(cell, runs)[1:]]
        table.add_row(*(values[number] for number in shown), style="bold" if runs.peer == OURS else None)
    return table


def write_report(comparison: Comparison, folder: Path) -> list[Path]:
    """Write Markdown, JSON and PNG into `folder`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"peers-{comparison.name}.{ending}" for ending in ("md", "json", "png")]
    paths[0].write_text(markdown(comparison, picture=paths[2].name))
    paths[1].write_text(json.dumps(comparison.as_data(), indent=1) + "\n")
    draw(comparison, paths[2])
    return paths


def markdown(comparison: Comparison, picture: str) -> str:
    """The report in Markdown."""
    lines = [f"# Peers side by side: {comparison.name}", ""]
    lines += [ABOUT, "", f"![Bars]({picture})", ""]
    lines += [f"- {key}: {value}" for key, value in (comparison.machine | comparison.setting).items()]
    for cell in comparison.cells:
        lines += ["", f"## {_title(cell)}", ""]
        lines += ["| " + " | ".join(HEADINGS) + " |", "|---" + "|---:" * (len(HEADINGS) - 1) + "|"]
        lines += ["| " + " | ".join(_row(cell, runs)) + " |" for runs in _fastest_first(cell)]
        busiest = max((runs.cores_of_others for runs in cell.runs), default=0.0)
        lines += ["", f"Other processes took at most {busiest:.2f} cores while one ran."]
        lines += ["", *(f"Left out: {PEERS[name].title}: {reason}" for name, reason in cell.left_out.items())]
    return "\n".join([*lines, *_settings(comparison)]).rstrip() + "\n"


def draw(comparison: Comparison, path: Path) -> None:
    """Draw bars of tokens per second by workload and peer; whiskers show the slowest and the fastest round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    peers = [name for name in PEERS if any(runs.peer == name for cell in comparison.cells for runs in cell.runs)]
    figure, axes = pyplot.subplots(figsize=(4 + 2.4 * len(comparison.cells), 4), layout="constrained")
    width = 0.85 / max(1, len(peers))
    for number, peer in enumerate(peers):
        places, spreads = [], []
        for place, cell in enumerate(comparison.cells):
            for runs in cell.runs:
                if runs.peer == peer:
                    places.append(place + (number - (len(peers) - 1) / 2) * width)
                    spreads.append(runs.tokens_per_second)
        whiskers = [[s.median - s.lowest for s in spreads], [s.highest - s.median for s in spreads]]
        heights = [spread.median for spread in spreads]
        color = COLORS[list(PEERS).index(peer)]
        bars = axes.bar(places, heights, width, yerr=whiskers, color=color, label=PEERS[peer].title, ecolor="#444")
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    axes.set_xticks(range(len(comparison.cells)), [cell.workload for cell in comparison.cells])
    axes.set_ylabel("output tokens/s")
    processor = comparison.machine["processor"].partition(" (")[0]
    axes.set_title(f"{comparison.name}, {processor}, {comparison.setting['threads']} threads")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _title(cell: CellResult) -> str:
    tokens = f"{cell.num_prompt_tokens:,} prompt and {cell.num_output_tokens:,} output tokens"
    return f"{cell.workload}: {cell.description}; {tokens}"


def _fastest_first(cell: CellResult) -> list[PeerRuns]:
    return sorted(cell.runs, key=lambda runs: -runs.tokens_per_second.median)


def _row(cell: CellResult, runs: PeerRuns) -> list[str]:
    speed, ratio = runs.tokens_per_second, cell.ratio(runs)
    shares = [measure(share) for measure in (runs.first_token_seconds, runs.latency_seconds) for share in (0.5, 0.95)]
    return [
        PEERS[runs.peer].title,
        f"{speed.median:.1f}",
        f"{speed.lowest:.1f}",
        f"{speed.highest:.1f}",
        *_ratio(ratio),
        f"{runs.peak_memory:,.0f}",
        *(f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}" for seconds in shares),
    ]


def _ratio(ratio: Spread | None) -> list[str]:
    return [f"{value:.2f}" for value in (ratio.median, ratio.lowest, ratio.highest)] if ratio else [""] * 3


def _settings(comparison: Comparison) -> list[str]:
    """Return how each peer was run, as it reported when it was loaded."""
    lines = ["", "## How each was run", ""]
    lines += ["| | workload | versions | options | import s | load s | MiB after import | MiB after load |"]
    lines += ["|---|---|---|---|---:|---:|---:|---:|"]
    for cell in comparison.cells:
        for runs in cell.runs:
            loaded = runs.loaded
            versions = ", ".join(f"{name} {version}" for name, version in loaded.versions.items())
            options = ", ".join(f"{name}={value}" for name, value in loaded.options.items())
            figures = f"{loaded.import_seconds:.1f} | {loaded.load_seconds:.1f}"
            memory = " | ".join(f"{x / MEBIBYTE:,.0f}" for x in (loaded.memory_after_import, loaded.memory_after_load))
            lines.append(
                f"| {PEERS[runs.peer].title} | {cell.workload} | {versions} | {options} | {figures} | {memory} |"
            )
    return lines
