"""How a long prompt affects decoding sequences: their inter-token latency during its prefill, in three settings.

python benchmarks/latency_under_prefill.py

GPT-2 124M (random weights, 8,192 positions); 8 sequences decode when a prompt of 4,000 tokens arrives. The settings: no
such prompt; the prompt under the limit that is derived from measured speed (the default when serving); the whole prompt
in one step. Every decode gets a token in every step, so its latency is the time between steps.
"""

import argparse
import platform
import random
import time

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.params import SamplingParams
from inflight.engine.engine import Engine
from inflight.engine.step_feedback import PrefillLimit

NUM_DECODES, NUM_PROMPT_TOKENS, NUM_WARM_UP_STEPS, NUM_QUIET_STEPS = 8, 4000, 20, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    model: PreTrainedModel = GPT2LMHeadModel(GPT2Config(n_positions=8192))
    model = model.to(getattr(torch, options.dtype)).eval()
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {options.dtype}")
    gaps: dict[str, list[float]] = {"no prefill": [], "limited": [], "whole prompt": []}
    waits: dict[str, list[float]] = {"limited": [], "whole prompt": []}
    for _ in range(options.rounds):
        for name in waits:
            quiet, busy, first_token = measure(model, limited=name == "limited")
            gaps["no prefill"] += quiet
            gaps[name] += busy
            waits[name].append(first_token)
    print(f"inter-token latency of {NUM_DECODES} decodes, and time to the first token of the long prompt:")
    for name, seconds in gaps.items():
        p50, p99, worst = np.percentile(seconds, [50, 99, 100]) * 1000
        wait = f", first token after {np.median(waits[name]):.2f} s" if name in waits else ""
        print(f"  {name:13} p50 {p50:7.1f} ms   p99 {p99:7.1f} ms   worst {worst:7.1f} ms{wait}")


def measure(model: PreTrainedModel, *, limited: bool) -> tuple[list[float], list[float], float]:
    """Return the seconds between tokens, before and during the long prefill, and the seconds to its first token."""
    engine = Engine(
        model,
        EngineConfig(speculation="off", max_num_seqs=NUM_DECODES + 1, max_num_batched_tokens=NUM_PROMPT_TOKENS + 64),
    )
    engine.feedback.prefill_limit = PrefillLimit() if limited else None
    rng = random.Random(0)
    for number in range(NUM_DECODES):
        submit(engine, str(number), [rng.randrange(50257) for _ in range(32)], max_tokens=4000)
    if limited:  # a server learns from earlier prompts what a token costs
        submit(engine, "earlier", [rng.randrange(50257) for _ in range(256)], max_tokens=1)
    for _ in range(NUM_WARM_UP_STEPS):
        engine.step()
    quiet = [step(engine)[0] for _ in range(NUM_QUIET_STEPS)]
    submit(engine, "long", [rng.randrange(50257) for _ in range(NUM_PROMPT_TOKENS)], max_tokens=1)
    busy, is_done = [], False
    while not is_done:
        seconds, is_done = step(engine)
        busy.append(seconds)
    for number in range(NUM_DECODES):
        engine.abort(str(number))
    return quiet, busy, sum(busy)


def submit(engine: Engine, request_id: str, prompt: list[int], max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.submit(engine.inputs.accept(request_id, prompt, params))


def step(engine: Engine) -> tuple[float, bool]:
    """Run one step; return its seconds, and whether the long prompt got its token."""
    start = time.perf_counter()
    outputs = engine.step()
    return time.perf_counter() - start, any(output.request_id == "long" for output in outputs)


if __name__ == "__main__":
    main()
