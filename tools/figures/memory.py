"""Figures: where keys and values are stored: paging against reservation, preemption, shared prefixes."""

import random
from functools import partial

import torch

from inflight.contracts.config import EngineConfig
from inflight.contracts.params import SamplingParams
from inflight.contracts.record import StepRecord
from inflight.demo_model import DEMO_MODEL
from inflight.engine.engine import Engine
from inflight.lessons import shared_prefix, static_batching
from inflight.lessons.methods import warm_up
from inflight.lessons.race import mixed_requests
from inflight.lessons.run import LessonRequest
from inflight.lessons.static_bench import gpt2_with_random_weights
from inflight.llm import LLM
from inflight.observe.pictures import new_figure
from tools.figures.drawing import ALARM, DECODE, INK, PADDING, PREFILL, Drawing, steps_of, tidy

MAX_TOKENS = 400
OPENINGS = (
    "Once upon a time", "In a quiet village", "One morning", "Long ago", "This is the story of", "Many years ago",
    "Behind the old mill", "Mia was a", "On the first day of spring", "Once", "One cold day", "There was a shy dragon",
)  # fmt: skip

NUM_BLOCKS, BLOCK_SIZE = 24, 16

PREFIX, SUFFIX, NUM_NEW_TOKENS = 256, 16, 8
GROUP_SIZES = (1, 2, 4, 8)
ROUNDS = 3


def paging() -> Drawing:
    """Draw the cache that stories of unknown length take, and what reserving for the longest would take."""
    llm = LLM(dtype="float32", max_num_seqs=6, block_size=BLOCK_SIZE)
    records: list[StepRecord] = []
    llm.engine.observer = records.append
    params = [SamplingParams(temperature=0.8, seed=number, max_tokens=MAX_TOKENS) for number in range(len(OPENINGS))]
    outputs = llm.generate(list(OPENINGS), params, use_tqdm=False)
    last_step = {span.request_id: record.step for record in records for span in record.spans}
    reserved = {str(number): len(out.prompt_token_ids) + MAX_TOKENS for number, out in enumerate(outputs)}
    held, paged, promised = [], [], []
    for record in records:
        ends = {span.request_id: span.start + span.length for span in record.spans}
        given_back = sum(-(-end // BLOCK_SIZE) for request, end in ends.items() if last_step[request] == record.step)
        held.append(sum(ends.values()))
        paged.append((record.num_blocks_used + given_back) * BLOCK_SIZE)  # a record has the state after the step
        promised.append(sum(reserved[request] for request in ends))
    figure = new_figure(9, 3.2)
    panel = figure.subplots()
    panel.fill_between(range(len(records)), promised, color=PADDING, step="mid", label="reserved for max_tokens")
    panel.fill_between(range(len(records)), paged, color=PREFILL, step="mid", label="blocks in use")
    panel.fill_between(range(len(records)), held, color=DECODE, step="mid", label="tokens in the cache")
    panel.legend(fontsize=7, frameon=False)
    panel.margins(x=0.01)
    tidy(panel, f"{len(outputs)} stories, at most {MAX_TOKENS} tokens each, 6 slots", "step", "places in the cache")
    numbers = {
        "tokens a story": sorted(len(output.outputs[0].token_ids) for output in outputs),
        "max_tokens": MAX_TOKENS,
        "bytes a token": llm.model_info.kv_bytes_per_token,
        "most places": {"reserved": max(promised), "in blocks": max(paged), "tokens": max(held)},
        "tokens over reserved": round(sum(held) / sum(promised), 3),
        "tokens over blocks": round(sum(held) / sum(paged), 3),
    }
    return Drawing(figure, numbers)


def preemption() -> Drawing:
    """Draw a cache that is too small for eight slots: blocks, running and waiting requests, tokens computed twice."""
    small, ample = _steps_in(NUM_BLOCKS), _steps_in(None)
    steps = [record.step for record in small]
    before = [0, *(record.num_preemptions for record in small)]
    marks = [record.step for record in small if record.num_preemptions > before[record.step]]

    figure = new_figure(9, 4.4)
    blocks, sequences = figure.subplots(2, 1, sharex=True)
    blocks.fill_between(steps, [record.num_blocks_used for record in small], color=DECODE, step="mid")
    blocks.axhline(NUM_BLOCKS, color=INK, linewidth=1)
    tidy(blocks, f"blocks in use, of {NUM_BLOCKS}; dashed: a sequence gives its own back", y="blocks")
    running, waiting = [record.num_running for record in small], [record.num_waiting for record in small]
    sequences.stackplot(steps, running, waiting, colors=(DECODE, PADDING), labels=("running", "waiting"), step="mid")
    sequences.legend(fontsize=7, frameon=False)
    tidy(sequences, "sequences", "step", "sequences")
    for panel in (blocks, sequences):
        panel.margins(x=0.01)
        for mark in marks:
            panel.axvline(mark, color=ALARM, linestyle="--", linewidth=0.8)
    numbers = {
        "preemptions": small[-1].num_preemptions,
        "steps": {"small cache": len(small), "ample cache": len(ample)},
        "tokens computed": {name: sum(r.num_tokens for r in run) for name, run in (("small", small), ("ample", ample))},
        "blocks": {"small": NUM_BLOCKS, "most used of the ample": max(record.num_blocks_used for record in ample)},
    }
    return Drawing(figure, numbers)


def prefix_sharing() -> Drawing:
    """Draw groups of prompts with a common prefix on a GPT-2: static waves, and computing the prefix once."""
    model = gpt2_with_random_weights(torch.float32)
    rng = random.Random(0)
    prefix = [rng.randrange(model.config.vocab_size) for _ in range(PREFIX)]
    suffixes = [[rng.randrange(model.config.vocab_size) for _ in range(SUFFIX)] for _ in range(GROUP_SIZES[-1])]
    requests = [LessonRequest(prefix + suffix, NUM_NEW_TOKENS) for suffix in suffixes]
    methods = {
        "static": partial(static_batching.run, model, num_slots=GROUP_SIZES[-1]),
        "shared prefix": partial(
            shared_prefix.generate_many, model, n_prefix_chunks=PREFIX // shared_prefix.CHUNK_SIZE
        ),
    }
    warm_up(methods, requests)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    tokens: dict[str, list[int]] = {name: [] for name in methods}
    for size in GROUP_SIZES:
        contestants = {name: partial(method, requests[:size]) for name, method in methods.items()}
        runs = [{name: run() for name, run in contestants.items()} for _ in range(ROUNDS)]
        for name in methods:
            seconds[name].append(min(run[name].seconds for run in runs))
            lanes = [lane for step in runs[0][name].steps for lane in step.values()]
            tokens[name].append(sum(lane.num_tokens for lane in lanes if lane.use == "prefill"))
        assert len({str(run.token_ids) for run in runs[0].values()}) == 1, "both give the same tokens"

    figure = new_figure(9, 3.2)
    left, right = figure.subplots(1, 2)
    for panel, values, title in ((left, tokens, "prompt tokens computed"), (right, seconds, "seconds in all")):
        for name, colour in zip(methods, (PREFILL, DECODE), strict=True):
            panel.plot(GROUP_SIZES, values[name], "o-", color=colour, label=name)
        panel.set_xticks(GROUP_SIZES)
        panel.set_ylim(bottom=0)
        tidy(panel, title, f"prompts with {PREFIX} tokens in common")
    left.legend(fontsize=7, frameon=False)
    numbers = {
        "tokens": {"in common": PREFIX, "of its own": SUFFIX, "new": NUM_NEW_TOKENS},
        "group sizes": GROUP_SIZES,
        "prompt tokens computed": tokens,
        "seconds": {name: [round(each, 3) for each in values] for name, values in seconds.items()},
    }
    return Drawing(figure, numbers)


def _steps_in(num_blocks: int | None) -> list[StepRecord]:
    """Return the steps of 16 requests through 8 slots with this many blocks."""
    config = EngineConfig(dtype="float32", max_num_seqs=8, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    engine = Engine(str(DEMO_MODEL), config)
    return steps_of(engine, mixed_requests(16, 120, engine.model_info.vocab_size, seed=1))
