"""Figures: where keys and values are stored: paging against reservation, preemption, shared prefixes."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.params import SamplingParams
from inflight.contracts.step.record import StepRecord
from inflight.demo_model import DEMO_MODEL
from inflight.engine.engine import Engine
from inflight.entrypoints.llm import LLM
from inflight.execution.preparation.own_attention import prepack_weights
from inflight.execution.weights.prepacked_linear import can_prepack
from inflight.lessons import shared_prefix
from inflight.lessons.methods import Method, Setting, warm_up
from inflight.lessons.race import mixed_requests
from inflight.lessons.run import LessonRequest
from inflight.lessons.static_bench import gpt2_with_random_weights
from inflight.observe.pictures import new_figure
from tools.figures.drawing import ALARM, DECODE, INK, PADDING, PREFILL, Drawing, steps_of, tidy

MAX_TOKENS = 400
OPENINGS = (
    "Once upon a time", "In a quiet village", "One morning", "Long ago", "This is the story of", "Many years ago",
    "Behind the old mill", "Mia was a", "On the first day of spring", "Once", "One cold day", "There was a shy dragon",
)  # fmt: skip

NUM_SLOTS, NUM_BLOCKS, BLOCK_SIZE = 8, 24, 16

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
    reserved = {str(number): len(out.prompt_token_ids) + MAX_TOKENS for number, out in enumerate(outputs)}
    paged = [BLOCK_SIZE * num_blocks for num_blocks in _blocks_used_during(records)]
    held = [sum(span.start + span.length for span in record.spans) for record in records]
    promised = [sum(reserved[span.request_id] for span in record.spans) for record in records]
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

    used, ample_used = _blocks_used_during(small), _blocks_used_during(ample)

    figure = new_figure(9, 4.4)
    blocks, sequences = figure.subplots(2, 1, sharex=True)
    blocks.fill_between(steps, used, color=DECODE, step="mid")
    blocks.axhline(NUM_BLOCKS, color=INK, linewidth=1)
    tidy(blocks, f"blocks in use, of {NUM_BLOCKS}; dashed: a sequence is preempted", y="blocks")
    running, waiting = [len(record.spans) for record in small], [record.num_waiting for record in small]
    sequences.stackplot(steps, running, waiting, colors=(DECODE, PADDING), labels=("running", "waiting"), step="mid")
    sequences.legend(fontsize=7, frameon=False)
    tidy(sequences, "sequences", "step", "sequences")
    for panel in (blocks, sequences):
        panel.margins(x=0.01)
        for mark in marks:
            panel.axvline(mark, color=ALARM, linestyle="--", linewidth=0.8)
    stalled = [step for step in steps if waiting[step] and running[step] < NUM_SLOTS and used[step] < NUM_BLOCKS]
    numbers = {
        "preemptions": small[-1].num_preemptions,
        "steps": {"small cache": len(small), "ample cache": len(ample)},
        "tokens computed": {name: sum(r.num_tokens for r in run) for name, run in (("small", small), ("ample", ample))},
        "blocks": {"small": NUM_BLOCKS, "most used of the ample": max(ample_used)},
        "steps in which a sequence waits beside a free slot and free blocks": len(stalled),
        "most free blocks in such a step": max((NUM_BLOCKS - used[step] for step in stalled), default=0),
    }
    return Drawing(figure, numbers)


def prefix_sharing() -> Drawing:
    """Draw groups of prompts with a common prefix on a GPT-2: static waves, computing the prefix once, and the engine.

    Both lessons run on the engine's own prepacked linear layers.
    """
    setting = Setting(
        gpt2_with_random_weights(torch.float32),
        EngineConfig(max_num_seqs=GROUP_SIZES[-1], max_model_len=512),
    )
    if can_prepack(setting.model):
        prepack_weights(setting.model)
    methods: dict[str, Method] = {
        "static": setting.methods["static"],
        "shared prefix": partial(
            shared_prefix.generate_many, setting.model, n_prefix_chunks=PREFIX // shared_prefix.CHUNK_SIZE
        ),
        "engine": setting.methods["engine"],
    }
    rng = random.Random(0)
    vocab_size = setting.engine.model_info.vocab_size
    warm_up(methods, _alike(rng, vocab_size, GROUP_SIZES[-1]))
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    tokens: dict[str, list[int]] = {name: [] for name in methods}
    for size in GROUP_SIZES:
        runs = []
        for _ in range(ROUNDS):
            requests = _alike(rng, vocab_size, size)  # new ones: the engine finds none of them in its prefix cache
            runs.append({name: run(requests) for name, run in methods.items()})
            assert len({str(run.token_ids) for run in runs[-1].values()}) == 1, "all give the same tokens"
        for name in methods:
            seconds[name].append(min(run[name].seconds for run in runs))
            lanes = [lane for step in runs[0][name].steps for lane in step.values()]
            tokens[name].append(sum(lane.num_tokens for lane in lanes if lane.use == "prefill"))

    figure = new_figure(9, 3.2)
    left, right = figure.subplots(1, 2)
    styles: tuple[dict[str, Any], ...] = (
        {"color": PREFILL},
        {"color": INK, "linewidth": 4, "alpha": 0.4},
        {"color": DECODE},
    )
    for panel, values, title in ((left, tokens, "prompt tokens computed"), (right, seconds, "seconds in all")):
        for name, style in zip(methods, styles, strict=True):
            panel.plot(GROUP_SIZES, values[name], "o-", label=name, **style)
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


def _alike(rng: random.Random, vocab_size: int, count: int) -> list[LessonRequest]:
    """Return requests with new random tokens: a prefix that all share, and a suffix for each."""
    prefix, *suffixes = ([rng.randrange(vocab_size) for _ in range(length)] for length in (PREFIX, *[SUFFIX] * count))
    return [LessonRequest(prefix + suffix, NUM_NEW_TOKENS) for suffix in suffixes]


def _blocks_used_during(records: Sequence[StepRecord]) -> list[int]:
    """Return the blocks in use in each step. (A record has those after it, when sequences that ended gave theirs back.)

    No two sequences may share a block.
    """
    last_step = {span.request_id: record.step for record in records for span in record.spans}
    return [
        record.num_blocks_used
        + sum(
            -(-(span.start + span.length) // BLOCK_SIZE)
            for span in record.spans
            if last_step[span.request_id] == record.step
        )
        for record in records
    ]


def _steps_in(num_blocks: int | None) -> list[StepRecord]:
    """Return the steps of 16 requests through 8 slots with this many blocks."""
    config = EngineConfig(
        speculation="off", dtype="float32", max_num_seqs=NUM_SLOTS, num_blocks=num_blocks, block_size=BLOCK_SIZE
    )
    engine = Engine(str(DEMO_MODEL), config)
    return steps_of(engine, mixed_requests(16, 120, engine.model_info.vocab_size, seed=1))
