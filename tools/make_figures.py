"""Draws the figures of `docs/how-it-works.md` and `docs/replicas.md` again, and writes the numbers that these quote
next to them.

    python -m tools.make_figures                      # all, into docs/figures; about three minutes on two cores
    python -m tools.make_figures paging preemption    # only these

Every figure comes from a run of the code in this tree. Deterministic figures (steps, tokens, blocks, simulated times)
are the same everywhere; measurements name the machine in their JSON.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.figures import batching, draft_tokens, memory, merging, prefill, routing, step
from tools.figures.drawing import Drawing

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"
FIGURES: Mapping[str, Callable[[], Drawing]] = {
    "decode-step": batching.decode_step,
    "static-waves": batching.static_waves,
    "merging": merging.merging,
    "padding": batching.padding,
    "ladder": batching.ladder,
    "latency": batching.latency,
    "mask": step.mixed_step,
    "paging": memory.paging,
    "chunked-prefill": prefill.chunked_prefill,
    "preemption": memory.preemption,
    "prefix-sharing": memory.prefix_sharing,
    "draft_tokens": draft_tokens.draft_tokens,
    "routing": routing.routing,
}


def main() -> None:
    """Draw the requested figures."""
    parser = argparse.ArgumentParser(description="Draw the figures of docs/how-it-works.md and docs/replicas.md.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"draw only these; choose from: {', '.join(FIGURES)}")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="the output folder")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(FIGURES):
        parser.error(f"there is no figure {', '.join(sorted(unknown))}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or FIGURES:
        start = time.perf_counter()
        FIGURES[name]().save(arguments.folder, name)
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
