"""What all figures share: their colours, their files, and engines whose steps are recorded."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.record import StepRecord
from inflight.engine.engine import Engine
from inflight.execution.kernels import kernels_available
from inflight.lessons.run import LessonRequest
from inflight.observe.pictures import save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PREFILL, DECODE, PADDING = "#e8a33d", "#2f8f5b", "#d9d9d9"
"""The colours of timelines."""

INK, ALARM = "#444444", "#c0392b"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure, and the numbers of the run that it shows."""

    figure: "Figure"
    numbers: Mapping[str, Any]

    def save(self, folder: Path, name: str) -> None:
        """Write `name.png`, and `name.json` with the numbers and the machine on which they were measured."""
        save_png(self.figure, folder / f"{name}.png")
        text = json.dumps({**self.numbers, "machine": machine()}, indent=2)
        (folder / f"{name}.json").write_text(text + "\n")


def machine() -> dict[str, Any]:
    """Return what measured times depend on: processor, threads, versions, and whether there are CPU kernels."""
    return {
        "processor": _processor(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "CPU kernels": kernels_available(),
    }


def _processor() -> str:
    """Return the processor's name as Linux gives it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def tidy(panel: "Axes", title: str, x: str = "", y: str = "") -> None:
    """Give a panel uniform titles and labels, and remove the box around it."""
    panel.set_title(title, loc="left", fontsize=9)
    panel.set_xlabel(x, fontsize=8)
    panel.set_ylabel(y, fontsize=8)
    panel.tick_params(labelsize=7, length=2)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def steps_of(
    engine: Engine, requests: Sequence[LessonRequest], arrivals: Mapping[int, int] | None = None
) -> list[StepRecord]:
    """Run requests greedily to their ends and return the records of all steps.

    Args:
        arrivals: for some requests, by index, the step before which they arrive; the others are there from the start.
    """
    records: list[StepRecord] = []
    engine.observer = records.append
    waiting = {number: (arrivals or {}).get(number, 0) for number in range(len(requests))}
    while waiting or engine.has_unfinished_requests:
        for number in [number for number, step in waiting.items() if step <= len(records)]:
            del waiting[number]
            asked = requests[number]
            params = SamplingParams(temperature=0, max_tokens=asked.max_new_tokens, ignore_eos=True)
            engine.submit(engine.inputs.accept(str(number), asked.prompt_token_ids, params))
        engine.step()
    engine.observer = None
    return records
