"""Figures: why batching helps, and how the rungs of the ladder use their slots."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from io import StringIO
from typing import Any

import torch
from rich.console import Console
from transformers import DynamicCache, PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.demo_model import DEMO_MODEL
from inflight.engine.engine import Engine
from inflight.execution.preparation.own_attention import prepack_weights
from inflight.execution.weights.formats import PLAIN
from inflight.execution.weights.prepacked_linear import can_prepack
from inflight.lessons.methods import Method, Setting, warm_up
from inflight.lessons.race import Race, mixed_requests, run_race
from inflight.lessons.run import CACHE, LessonRequest, Run
from inflight.lessons.scores import Scores
from inflight.lessons.static_bench import gpt2_with_random_weights
from inflight.observe.pictures import new_figure
from inflight.observe.timeline import timeline_figure
from inflight.profiling.machine import MachineMeter
from tools.figures.drawing import DECODE, INK, PADDING, PREFILL, Drawing, steps_of, tidy

NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
NUM_SLOTS = 8
ROUNDS = 3
COLOURS = ("#999999", PREFILL, "#7fc79b", DECODE)
"""The colours of static, padded, ragged, engine."""

COUNTS = ("num_steps", "occupancy", "token_padding", "key_padding")


def decode_step() -> Drawing:
    """Draw the time of a step that decodes 1 to 128 sequences with a GPT-2: in the engine, in plain `transformers`, and
    at the machine's two limits."""
    model = gpt2_with_random_weights(torch.float32)
    engine = Engine(model, EngineConfig(speculation="off", max_num_seqs=NUM_ROWS[-1], max_model_len=64))
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    meter = MachineMeter(torch.float32, PLAIN if can_prepack(model) else None)
    rounds = []
    _seconds_of_a_decode(engine, NUM_ROWS[0])  # the first steps after loading are slower
    for _ in range(ROUNDS):
        meter.measure()
        rounds.append([(_seconds_of_a_decode(engine, n), _seconds_of_a_plain_decode(model, n)) for n in NUM_ROWS])
    medians = [tuple(map(statistics.median, zip(*of_rows, strict=True))) for of_rows in zip(*rounds, strict=True)]
    in_engine, in_transformers = zip(*medians, strict=True)
    machine = meter.machine()
    memory_seconds = num_bytes / machine.read_bytes_per_second
    arithmetic_seconds = 2 * engine.model_info.num_parameters / machine.operations_per_second

    figure = new_figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    bound = [max(memory_seconds, rows * arithmetic_seconds) for rows in NUM_ROWS]
    for seconds, colour, label in (
        (in_transformers, COLOURS[0], "plain transformers"),
        (in_engine, DECODE, "the engine"),
    ):
        left.plot(NUM_ROWS, [1000 * each for each in seconds], "o-", color=colour, label=label)
        right.plot(NUM_ROWS, [rows / each for rows, each in zip(NUM_ROWS, seconds, strict=True)], "o-", color=colour)
    left.axhline(1000 * memory_seconds, color=INK, linestyle="--", linewidth=1, label="limit: read all weights once")
    line = [1000 * rows * arithmetic_seconds for rows in NUM_ROWS]
    left.plot(NUM_ROWS, line, ":", color=INK, linewidth=1, label="limit: multiply by all weights")
    left.set_ylim(500 * memory_seconds, 2000 * max(*in_engine, *in_transformers))
    left.legend(fontsize=7, frameon=False)
    tidy(left, "time of one decode step, float32", "sequences in the step", "milliseconds")
    right.plot(NUM_ROWS, [rows / each for rows, each in zip(NUM_ROWS, bound, strict=True)], "--", color=INK, lw=1)
    tidy(right, "throughput (dashed: the lower of the two limits)", "sequences in the step", "tokens/s")
    for panel, ticks in ((left, (10, 20, 50, 100, 200, 500)), (right, (25, 50, 100, 200, 400, 800))):
        panel.set_xscale("log", base=2)
        panel.set_xticks(NUM_ROWS, [str(rows) for rows in NUM_ROWS])
        panel.set_yscale("log")
        panel.set_yticks([], minor=True)
        panel.set_yticks(ticks, [str(tick) for tick in ticks])
    numbers = {
        "model": "GPT-2 124M, random weights, float32",
        "weight bytes": num_bytes,
        "parameters": engine.model_info.num_parameters,
        "cache bytes a token": engine.model_info.kv_bytes_per_token,
        "bytes a second": round(machine.read_bytes_per_second),
        "operations a second": round(machine.operations_per_second),
        "milliseconds to read all weights": round(1000 * memory_seconds, 2),
        "milliseconds to multiply one vector by all weights": round(1000 * arithmetic_seconds, 2),
        "milliseconds a step": {
            "engine": _by_rows(in_engine, lambda rows, each: round(1000 * each, 2)),
            "plain transformers": _by_rows(in_transformers, lambda rows, each: round(1000 * each, 2)),
        },
        "tokens a second": {
            "engine": _by_rows(in_engine, lambda rows, each: round(rows / each, 1)),
            "plain transformers": _by_rows(in_transformers, lambda rows, each: round(rows / each, 1)),
        },
    }
    return Drawing(figure, numbers)


def static_waves() -> Drawing:
    """Draw static waves on the embedded model: which request holds which slot in which step."""
    race = small_race()
    return Drawing(timeline_figure(race.timelines[:1]), _counts(race.scores["static"]))


def ladder() -> Drawing:
    """Draw the same requests through every rung, on one scale."""
    race = small_race()
    subtitles = [f"{scores.occupancy:.0%} of the slots used" for scores in race.scores.values()]
    scores = {name: _counts(scores) for name, scores in race.scores.items()}
    return Drawing(timeline_figure(race.timelines, subtitles), {**scores, **_requests_of(race)})


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
    prefills = [any(lane.use == "prefill" for lane in step.values()) for step in race.runs["padded"].steps]
    return Drawing(figure, {"share of padding": numbers, "passes of padded that stop running rows": sum(prefills[1:])})


def latency() -> Drawing:
    """Draw over time how many requests have their first token, and how many are done: a GPT-2 on every rung.

    The lessons run on the engine's own prepacked linear layers, so that rungs differ in how they batch and attend. The
    engine has no prefix cache, in which it would find the prompts of the round before.
    """
    config = EngineConfig(speculation="off", max_num_seqs=NUM_SLOTS, max_model_len=256, enable_prefix_caching=False)
    setting = Setting(gpt2_with_random_weights(torch.float32), config)
    requests = mixed_requests(16, 32, setting.engine.model_info.vocab_size, seed=0)
    lessons = {name: method for name, method in setting.methods.items() if name != "engine"}
    plain = _fastest_race(lessons, requests)
    if can_prepack(setting.model):
        prepack_weights(setting.model)
    race = _fastest_race(setting.methods, requests)
    figure = new_figure(9, 3.2)
    first, done = figure.subplots(1, 2, sharex=True, sharey=True)
    for (name, run), colour in zip(race.runs.items(), COLOURS, strict=True):
        first_tokens = sorted((answer.first_token_time or 0.0) - run.start_time for answer in run.answers)
        ends = sorted((answer.finished_time or 0.0) - run.start_time for answer in run.answers)
        for panel, seconds in ((first, first_tokens), (done, ends)):
            panel.step([0, *seconds], range(len(seconds) + 1), where="post", color=colour, label=name)
    tidy(first, "requests that have their first token", "seconds after the arrival of all requests", "requests")
    tidy(done, "requests that are done", "seconds after the arrival of all requests")
    done.legend(fontsize=7, frameon=False, loc="lower right", title="GPT-2 124M, float32", title_fontsize=7)
    numbers = {
        **{name: _rounded(scores) for name, scores in race.scores.items()},
        "seconds with the linear layers of transformers": {
            name: round(scores.seconds, 4) for name, scores in plain.scores.items()
        },
        **_requests_of(race),
    }
    return Drawing(figure, numbers)


@cache
def small_race() -> Race:
    """Run what `inflight race` runs: 24 requests on the embedded model, 8 slots."""
    setting = Setting(str(DEMO_MODEL), EngineConfig(dtype="float32", max_num_seqs=NUM_SLOTS))
    requests = mixed_requests(24, 120, setting.engine.model_info.vocab_size, seed=0)
    return run_race(setting.methods, requests, NUM_SLOTS, Console(file=StringIO()))


def _fastest_race(methods: Mapping[str, Method], requests: Sequence[LessonRequest]) -> Race:
    """Run `requests` through each method in turn, several times, and return the fastest run of each."""
    warm_up(methods, requests)
    rounds = [{name: method(requests) for name, method in methods.items()} for _ in range(ROUNDS)]
    return Race({name: min((each[name] for each in rounds), key=_seconds) for name in methods}, NUM_SLOTS)


def _requests_of(race: Race) -> dict[str, Any]:
    """Return what the requests of a race asked for, and whether all methods gave them the same tokens."""
    requests = next(iter(race.runs.values())).requests
    return {
        "prompt tokens": [len(request.prompt_token_ids) for request in requests],
        "new tokens": [request.max_new_tokens for request in requests],
        "requests with other tokens than static": race.differing,
    }


def _counts(scores: Scores) -> dict[str, float]:
    """Return the scores that do not depend on the machine's speed."""
    return {name: value for name, value in _rounded(scores).items() if name in COUNTS}


def _rounded(scores: Scores) -> dict[str, float]:
    return {name: round(value, 4) for name, value in asdict(scores).items()}


def _seconds(run: Run) -> float:
    return run.seconds


def _by_rows(seconds: Sequence[float], value: Callable[[int, float], float]) -> dict[int, float]:
    return {rows: value(rows, each) for rows, each in zip(NUM_ROWS, seconds, strict=True)}


def _seconds_of_a_decode(engine: Engine, num_rows: int) -> float:
    """Return the median seconds of a step in which this many sequences decode, each after 8 to 24 tokens."""
    rng = random.Random(num_rows)
    prompts = [[rng.randrange(engine.model_info.vocab_size) for _ in range(8)] for _ in range(num_rows)]
    records = steps_of(engine, [LessonRequest(prompt, 17) for prompt in prompts])
    return statistics.median(record.duration for record in records[1:] if record.num_tokens == num_rows)


@torch.inference_mode()
def _seconds_of_a_plain_decode(model: PreTrainedModel, num_rows: int) -> float:
    """Return the median seconds of the same step in `transformers`: one forward pass over a batch, and its argmax."""
    ids, cache = torch.randint(model.config.vocab_size, (num_rows, 8)), DynamicCache()
    seconds: list[float] = []
    for _ in range(17):
        start = time.perf_counter()
        logits = model(input_ids=ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(dim=-1, keepdim=True)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
