"""Figures: how a long prompt affects decoding sequences, in one step and in chunks."""

import random
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.step.record import StepRecord
from inflight.engine.engine import Engine
from inflight.lessons.run import LessonRequest
from inflight.lessons.static_bench import gpt2_with_random_weights
from inflight.observe.pictures import new_figure
from tools.figures.drawing import ALARM, DECODE, INK, PREFILL, Drawing, steps_of, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUDGETS = (1024, 256, 64)
NUM_DECODING, NUM_NEW_TOKENS, LONG_PROMPT, ARRIVAL = 4, 30, 900, 8


@dataclass(frozen=True, slots=True)
class Disturbance:
    """The steps of a run in which, before step `ARRIVAL`, a long prompt arrives while other sequences decode."""

    records: list[StepRecord]

    @property
    def start_time(self) -> float:
        """When the long prompt arrives."""
        return self.records[ARRIVAL].start_time

    @property
    def prefill_steps(self) -> list[StepRecord]:
        """The steps that compute a part of the long prompt."""
        return [record for record in self.records[ARRIVAL:] if any(span.kind != "decode" for span in record.spans)]

    @property
    def first_token_seconds(self) -> float:
        """Seconds from the long prompt's arrival to its first token."""
        last = self.prefill_steps[-1]
        return last.start_time + last.duration - self.start_time

    @property
    def longest_gap(self) -> float:
        """The most seconds that decoding sequences waited for their next token."""
        return max(record.duration for record in self.prefill_steps)

    @property
    def usual_gap(self) -> float:
        """Seconds between two tokens before the long prompt arrived."""
        return median(record.duration for record in self.records[1:ARRIVAL])


def chunked_prefill() -> Drawing:
    """Draw the gaps between tokens of running sequences during a long prefill, under three token budgets."""
    model = gpt2_with_random_weights(torch.float32)
    figure = new_figure(9, 5.2)
    panels = figure.subplots(len(BUDGETS), 1, sharex=True, sharey=True)
    numbers = {}
    for panel, budget in zip(panels, BUDGETS, strict=True):
        engine = Engine(
            model, EngineConfig(speculation="off", max_num_seqs=NUM_DECODING + 1, max_num_batched_tokens=budget)
        )
        runs = sorted((_disturb(engine, seed) for seed in range(3)), key=lambda run: run.first_token_seconds)
        run = runs[1]
        _draw(panel, run, budget)
        numbers[budget] = {
            "usual gap ms": round(1000 * run.usual_gap, 1),
            "longest gap ms": round(1000 * run.longest_gap, 1),
            "first token of the long prompt s": round(run.first_token_seconds, 3),
            "steps of the long prompt": len(run.prefill_steps),
        }
    panels[-1].set_xlabel("seconds after the arrival of the long prompt", fontsize=8)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7, frameon=False
    )
    return Drawing(
        figure,
        {
            "long prompt": LONG_PROMPT,
            "decoding": NUM_DECODING,
            "model": "GPT-2 124M, random weights, float32",
            "by budget": numbers,
        },
    )


def _draw(panel: "Axes", run: Disturbance, budget: int) -> None:
    """Draw a bar for each step, whose width and height are the step's time: the time that decodes wait for a token."""
    prefills = {record.step for record in run.prefill_steps}
    for colour, label, is_prefill in ((DECODE, "decodes alone", False), (PREFILL, "with the long prompt", True)):
        shown = [record for record in run.records[2:] if (record.step in prefills) == is_prefill]
        panel.bar(
            [record.start_time - run.start_time for record in shown],
            [1000 * record.duration for record in shown],
            [record.duration for record in shown],
            align="edge", color=colour, edgecolor="white", linewidth=0.4, label=label,
        )  # fmt: skip
    panel.axvline(0, color=INK, linestyle="--", linewidth=1, label="the long prompt arrives")
    panel.axvline(run.first_token_seconds, color=ALARM, linestyle="--", linewidth=1, label="its first token")
    title = f"at most {budget} tokens per step: longest gap {1000 * run.longest_gap:.0f} ms"
    tidy(panel, f"{title}, first token of the long prompt after {run.first_token_seconds:.2f} s", y="gap, ms")


def _disturb(engine: Engine, seed: int) -> Disturbance:
    """Run once. Each seed gives other prompts, so that the engine finds none of them in its prefix cache."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(engine.model_info.vocab_size) for _ in range(16)] for _ in range(NUM_DECODING)]
    long_prompt = [rng.randrange(engine.model_info.vocab_size) for _ in range(LONG_PROMPT)]
    requests = [*(LessonRequest(prompt, NUM_NEW_TOKENS) for prompt in prompts), LessonRequest(long_prompt, 4)]
    records = steps_of(engine, requests, {NUM_DECODING: ARRIVAL})
    return Disturbance([record for record in records if len(record.spans) > 1])
