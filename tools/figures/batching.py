"""Figures: why batching helps, and how the rungs of the ladder use their slots."""

import random
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from io import StringIO
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from inflight.contracts.config import EngineConfig
from inflight.demo_model import DEMO_MODEL
from inflight.engine.engine import Engine
from inflight.lessons.methods import Setting
from inflight.lessons.race import Race, mixed_requests, run_race
from inflight.lessons.run import LessonRequest, Run
from inflight.lessons.scores import Scores
from inflight.lessons.static_bench import gpt2_with_random_weights
from inflight.observe.pictures import new_figure
from inflight.observe.timeline_figure import timeline_figure
from tools.figures.drawing import DECODE, INK, PADDING, PREFILL, Drawing, steps_of, tidy

NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
NUM_SLOTS = 8
ROUNDS = 3
COLOURS = ("#999999", PREFILL, "#7fc79b", DECODE)
"""The colours of static, padded, ragged, engine."""


def decode_step() -> Drawing:
    """Draw the time of a step that decodes 1 to 128 sequences with a GPT-2, between the machine's two limits."""
    model = gpt2_with_random_weights(torch.float32)
    engine = Engine(model, EngineConfig(max_num_seqs=NUM_ROWS[-1], max_model_len=64))
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    memory_seconds = num_bytes / _bytes_per_second()
    arithmetic_seconds = 2 * engine.model_info.num_parameters / _operations_per_second()
    seconds = [_seconds_of_a_decode(engine, rows) for rows in NUM_ROWS]
    head_seconds = [_seconds_of_output_layer(model, rows) for rows in NUM_ROWS]

    figure = new_figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    bound = [max(memory_seconds, rows * arithmetic_seconds) for rows in NUM_ROWS]
    left.plot(NUM_ROWS, [1000 * each for each in seconds], "o-", color=DECODE, label="measured")
    head = [1000 * each for each in head_seconds]
    left.plot(NUM_ROWS, head, ".-", color=COLOURS[2], linewidth=1, label="of that, the output layer's product")
    left.axhline(1000 * memory_seconds, color=INK, linestyle="--", linewidth=1, label="to read all weights once")
    line = [1000 * rows * arithmetic_seconds for rows in NUM_ROWS]
    left.plot(NUM_ROWS, line, ":", color=INK, linewidth=1, label="to multiply by all weights")
    left.set_ylim(bottom=250 * memory_seconds)
    left.legend(fontsize=7, frameon=False)
    tidy(left, "one step", "sequences in the step", "milliseconds")
    right.plot(NUM_ROWS, [rows / each for rows, each in zip(NUM_ROWS, seconds, strict=True)], "o-", color=DECODE)
    right.plot(NUM_ROWS, [rows / each for rows, each in zip(NUM_ROWS, bound, strict=True)], "--", color=INK, lw=1)
    tidy(right, "throughput (dashed: the machine's limit)", "sequences in the step", "tokens/s")
    for panel, ticks in ((left, (10, 20, 50, 100, 200, 500)), (right, (25, 50, 100, 200, 400, 800))):
        panel.set_xscale("log", base=2)
        panel.set_xticks(NUM_ROWS, [str(rows) for rows in NUM_ROWS])
        panel.set_yscale("log")
        panel.set_yticks([], minor=True)
        panel.set_yticks(ticks, [str(tick) for tick in ticks])
    numbers = {
        "model": "GPT-2 124M, random weights, float32",
        "weight bytes": num_bytes,
        "bytes a second": round(num_bytes / memory_seconds),
        "operations a second": round(2 * engine.model_info.num_parameters / arithmetic_seconds),
        "milliseconds to read all weights": round(1000 * memory_seconds, 2),
        "milliseconds a step": {rows: round(1000 * each, 2) for rows, each in zip(NUM_ROWS, seconds, strict=True)},
        "milliseconds of the output layer": {
            rows: round(1000 * each, 2) for rows, each in zip(NUM_ROWS, head_seconds, strict=True)
        },
        "tokens a second": {rows: round(rows / each, 1) for rows, each in zip(NUM_ROWS, seconds, strict=True)},
    }
    return Drawing(figure, numbers)


def static_waves() -> Drawing:
    """Draw static waves on the embedded model: which request holds which slot in which step."""
    race = small_race()
    return Drawing(timeline_figure(race.timelines[:1]), _rounded(race.scores["static"]))


def ladder() -> Drawing:
    """Draw the same requests through every rung, on one scale."""
    race = small_race()
    subtitles = [f"{scores.occupancy:.0%} of the slots used" for scores in race.scores.values()]
    return Drawing(timeline_figure(race.timelines, subtitles), _told(race))


def padding() -> Drawing:
    """Draw the keys that each step attends over on three rungs, and how many of them are padding."""
    race = small_race()
    names = ("static", "padded", "ragged")
    figure = new_figure(9, 3)
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    for panel, name in zip(panels, names, strict=True):
        steps = race.runs[name].steps
        needed = [sum(lane.num_keys - lane.num_padding_keys for lane in step.values()) for step in steps]
        wasted = [sum(lane.num_padding_keys for lane in step.values()) for step in steps]
        panel.stackplot(
            range(len(steps)), needed, wasted, colors=(DECODE, PADDING), labels=("needed", "padding"), step="mid"
        )
        panel.margins(x=0.01)
        tidy(panel, f"{name}: {race.scores[name].key_padding:.0%} of all keys are padding", "step")
    panels[0].set_ylabel("keys in the step", fontsize=8)
    panels[2].legend(fontsize=7, frameon=False)
    numbers = {
        name: {"keys": round(race.scores[name].key_padding, 4), "tokens": round(race.scores[name].token_padding, 4)}
        for name in names
    }
    return Drawing(figure, {"share of padding": numbers})


def latency() -> Drawing:
    """Draw over time how many requests have their first token, and how many are done: a GPT-2 on every rung."""
    setting = Setting(gpt2_with_random_weights(torch.float32), EngineConfig(max_num_seqs=NUM_SLOTS, max_model_len=256))
    requests = mixed_requests(16, 32, setting.engine.model_info.vocab_size, seed=0)
    rounds = [run_race(setting.methods, requests, NUM_SLOTS, Console(file=StringIO())) for _ in range(ROUNDS)]
    runs = {name: min((each.runs[name] for each in rounds), key=_seconds) for name in rounds[0].runs}
    race = Race(runs, NUM_SLOTS)
    figure = new_figure(9, 3.2)
    first, done = figure.subplots(1, 2, sharex=True, sharey=True)
    for (name, run), colour in zip(race.runs.items(), COLOURS, strict=True):
        first_tokens = sorted((answer.first_token_time or 0.0) - run.start_time for answer in run.answers)
        ends = sorted((answer.finished_time or 0.0) - run.start_time for answer in run.answers)
        for panel, seconds in ((first, first_tokens), (done, ends)):
            panel.step([0, *seconds], range(len(seconds) + 1), where="post", color=colour, label=name)
    tidy(first, "requests that have their first token", "seconds since all arrived", "requests")
    tidy(done, "requests that are done", "seconds since all arrived")
    done.legend(fontsize=7, frameon=False, loc="lower right")
    return Drawing(figure, _told(race))


@cache
def small_race() -> Race:
    """Run what `inflight race` runs: 24 requests on the embedded model, 8 slots."""
    setting = Setting(str(DEMO_MODEL), EngineConfig(dtype="float32", max_num_seqs=NUM_SLOTS))
    requests = mixed_requests(24, 120, setting.engine.model_info.vocab_size, seed=0)
    return run_race(setting.methods, requests, NUM_SLOTS, Console(file=StringIO()))


def _told(race: Race) -> dict[str, Any]:
    """Return the numbers of a race that the text quotes."""
    requests = next(iter(race.runs.values())).requests
    return {
        **{name: _rounded(scores) for name, scores in race.scores.items()},
        "prompt tokens": [len(request.prompt_token_ids) for request in requests],
        "new tokens": [request.max_new_tokens for request in requests],
        "requests with other tokens than static": race.differing,
    }


def _rounded(scores: Scores) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(scores).items()}


def _seconds(run: Run) -> float:
    return run.seconds


def _seconds_of_a_decode(engine: Engine, num_rows: int) -> float:
    """Return the seconds of the fastest step in which this many sequences decode, each after 8 to 24 tokens."""
    rng = random.Random(num_rows)
    prompts = [[rng.randrange(engine.model_info.vocab_size) for _ in range(8)] for _ in range(num_rows)]
    records = steps_of(engine, [LessonRequest(prompt, 16) for prompt in prompts])
    return min(record.duration for record in records if record.num_tokens == num_rows)


def _seconds_of_output_layer(model: PreTrainedModel, num_rows: int) -> float:
    """Return the seconds of a step's largest matrix product alone: the hidden states of all sequences to logits."""
    head = model.get_output_embeddings()
    hidden = torch.randn(num_rows, model.config.hidden_size)
    with torch.inference_mode():
        return _fastest(lambda: head(hidden))


def _bytes_per_second() -> float:
    """Measure how fast a matrix that fits no cache is read, by multiplying it with one vector."""
    matrix, vector = torch.ones(8192, 16384), torch.ones(16384)
    return matrix.numel() * matrix.element_size() / _fastest(lambda: matrix @ vector)


def _operations_per_second() -> float:
    """Measure how fast square matrices are multiplied."""
    size = 2048
    a, b = torch.ones(size, size), torch.ones(size, size)
    return 2 * size**3 / _fastest(lambda: a @ b)


def _fastest(work: Callable[[], object], rounds: int = 11) -> float:
    """Return the shortest of several times in seconds, because other programs can only make the work slower."""
    seconds: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
