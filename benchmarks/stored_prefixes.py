"""What a folder of prefixes gains and costs: `prefix_cache_dir` against computing, in one process.

python -m benchmarks.stored_prefixes --model qwen3-0.6b --dtype bfloat16 --measure first-token,beside,idle

- `first-token`: seconds to the first token of a 4,096-token prompt, computed, and restored by an engine that was
  started anew, with the files out of the system's memory (as far as it lets go of them).
- `beside`: seconds between the tokens of eight decodes: alone, while prompts are restored beside them, and while
  everything that was computed before is saved.
- `idle`: tokens a second of the workload W2-32 with a folder that is never hit, and without one.
"""

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.models import model_folder
from benchmarks.workloads import WORKLOADS
from inflight import LLM, SamplingParams

PROMPT_LENGTH, NUM_DECODES, NUM_STEPS = 4096, 8, 300
ONE = SamplingParams(temperature=0, max_tokens=1)
FOREVER = 600.0


def open_llm(folder: Path | None, arguments: argparse.Namespace, **others: Any) -> LLM:
    """An engine with an empty cache of its own, with or without a folder."""
    options: dict[str, Any] = {"dtype": arguments.dtype, "speculation": "off", "kv_cache_memory": 6 * 2**30}
    if arguments.quantization:
        options["quantization"] = arguments.quantization
    return LLM(model_folder(arguments.model), prefix_cache_dir=folder, **{**options, **others})


def prompt_of(seed: int, length: int = PROMPT_LENGTH) -> dict[str, Any]:
    """Random tokens."""
    rng = random.Random(seed)
    return {"prompt_token_ids": [rng.randrange(1000, 30_000) for _ in range(length)]}


def flush(llm: LLM) -> None:
    """Save everything."""
    assert llm.engine._store is not None
    llm.engine._store.flush(FOREVER)


def let_go_of_files(folder: Path) -> None:
    """Ask the system to forget the content of all files."""
    os.sync()
    for path in folder.rglob("*.?"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_token(arguments: argparse.Namespace, folder: Path) -> None:
    """Print how long the first token of a long prompt takes."""
    computed, restored = [], []
    for number in range(arguments.rounds):
        llm = open_llm(folder, arguments)
        llm.generate([prompt_of(-1, 64)], ONE, use_tqdm=False)  # both begin warm
        start = time.perf_counter()
        (expected,) = llm.generate([prompt_of(number)], ONE, use_tqdm=False)
        computed.append(time.perf_counter() - start)
        flush(llm)
        del llm
        let_go_of_files(folder)
        llm = open_llm(folder, arguments)
        llm.generate([prompt_of(-2, 64)], ONE, use_tqdm=False)
        start = time.perf_counter()
        (output,) = llm.generate([prompt_of(number)], ONE, use_tqdm=False)
        restored.append(time.perf_counter() - start)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert llm.engine.scheduler.num_restored_tokens >= PROMPT_LENGTH - 16
    ratio = statistics.median(computed) / statistics.median(restored)
    print(
        f"first token of {PROMPT_LENGTH} tokens: computed {statistics.median(computed):.2f} s, restored "
        f"{statistics.median(restored):.3f} s ({ratio:.1f})"
    )


def decode_times(llm: LLM, prompts: list[dict[str, Any]]) -> list[float]:
    """Seconds of each step in which eight sequences decode, while these prompts come in beside them."""
    engine = llm.engine
    decoding = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
    for number in range(NUM_DECODES):
        prompt = prompt_of(1000 + number + random.randrange(10**6), 64)["prompt_token_ids"]
        engine.submit(engine.accept(f"decode {number}", prompt, decoding))
    engine.step()
    for number, prompt in enumerate(prompts):
        engine.submit(engine.accept(f"prompt {number}", prompt["prompt_token_ids"], ONE))
    seconds = []
    while engine.has_unfinished_requests:
        start = time.perf_counter()
        outputs = engine.step()
        if sum(output.request_id.startswith("decode") for output in outputs) == NUM_DECODES:
            seconds.append(time.perf_counter() - start)
    return seconds


def beside(arguments: argparse.Namespace, folder: Path) -> None:
    """Print what restoring and saving do to others."""
    num_prompts = arguments.tokens // PROMPT_LENGTH
    prompts = [prompt_of(number) for number in range(num_prompts)]
    llm = open_llm(folder, arguments)
    llm.generate(prompts, ONE, use_tqdm=False)
    assert llm.engine._store is not None
    saved_before = llm.engine._store.num_saved
    saving = decode_times(llm, [])
    num_saved = llm.engine._store.num_saved - saved_before
    alone = decode_times(llm, [])
    flush(llm)
    del llm
    let_go_of_files(folder)
    llm = open_llm(folder, arguments)
    llm.generate([prompt_of(-1, 64)], ONE, use_tqdm=False)
    restoring = decode_times(llm, prompts)
    print(f"while decoding, {num_saved} blocks were saved, {llm.engine.scheduler.num_restored_tokens} tokens restored")
    for name, seconds in (("alone", alone), ("saving", saving), ("restoring", restoring)):
        p50, p99 = np.percentile(np.array(seconds), (50, 99)) * 1000
        print(f"{NUM_DECODES} decodes, {name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, {len(seconds)} steps")


def idle(arguments: argparse.Namespace, folder: Path) -> None:
    """Print what a folder costs that is never hit."""
    rates: dict[str, list[float]] = {"without": [], "with a folder": []}
    llms = {"without": open_llm(None, arguments), "with a folder": open_llm(folder, arguments)}
    lengths = WORKLOADS["W2-32"].lengths
    for number in range(arguments.rounds + 1):
        for name, llm in llms.items():
            prompts = [prompt_of(1000 * number + each, length) for each, (length, _) in enumerate(lengths)]
            params = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for _, most in lengths]
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            if number:
                rates[name].append(sum(len(each.outputs[0].token_ids) for each in outputs) / seconds)
    without, having = (statistics.median(each) for each in rates.values())
    print(f"W2-32: {without:.1f} tokens/s without, {having:.1f} with a folder ({having / without:.3f})")


MEASURES = {"first-token": first_token, "beside": beside, "idle": idle}


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--measure", default=",".join(MEASURES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16 * PROMPT_LENGTH, help="restored and saved beside decodes")
    arguments = parser.parse_args()
    for name in arguments.measure.split(","):
        folder = Path(tempfile.mkdtemp(prefix="prefixes-"))
        try:
            MEASURES[name](arguments, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # an engine that has ended may still save


if __name__ == "__main__":
    main()
