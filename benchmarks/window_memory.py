"""What sliding windows save: cache memory of long sequences, compared with the minimum.

python benchmarks/window_memory.py

The shapes are Gemma 3 1B's, and a Gemma 4's (the library's default: 25 layers with a window, 5 without, whose heads are
twice as wide) with small sizes where they do not affect the cache.

The minimum is, in each layer, the keys and values of all tokens or of the window's tokens. "In use" are the blocks that
are held while all sequences decode. "Resident" is the growth of the process: activations, and all memory that was ever
touched, including by the long spans of prefills and by blocks kept for the prefix cache. Finally a prompt arrives that
begins with the first half of another one. The same is measured with windows ignored: then all layers keep everything.
"""

import argparse
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds only its own folder

from benchmarks.compare import RESULTS, describe_machine
from benchmarks.peers.protocol import resident_memory
from benchmarks.shapes import GEMMA_3_1B, GEMMA_4_NARROW, Shape

NUM_DECODES = 96
"""Enough for all sequences to decode together before the first one ends."""
SPARE_SLOTS = 4
"""Slots beyond those that run, so that the prefix cache has their memory."""
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Case:
    """A number of sequences of equal length, computed in spans of up to `budget` tokens."""

    shape: Shape
    num_sequences: int
    num_tokens: int
    budget: int
    uses_windows: bool = True
    caches_prefixes: bool = True


@dataclass(frozen=True)
class Measured:
    """Bytes; and how many prompt tokens the last sequence, which begins like the first, found in the cache."""

    least: int
    in_use: int
    resident: int
    num_cached: int


def measure(folder: str, case: Case) -> Measured:
    """Run a case in this fresh process."""
    from inflight import LLM, SamplingParams
    from inflight.execution.attention import grouping as cache_groups

    if not case.uses_windows:
        cache_groups.MAX_GROUPS = 0
    llm = LLM(
        folder,
        load_format="dummy",
        dtype="bfloat16",
        max_num_seqs=case.num_sequences + SPARE_SLOTS,
        max_num_batched_tokens=case.budget,
        max_model_len=case.num_tokens + 64,
        enable_prefix_caching=case.caches_prefixes,
    )
    engine, before, chance = llm.engine, resident_memory(), Random(0)
    params = SamplingParams(temperature=0, max_tokens=NUM_DECODES + 1, ignore_eos=True)
    num_prompt_tokens = case.num_tokens - NUM_DECODES
    prompts = [chance.choices(range(1000), k=num_prompt_tokens) for _ in range(case.num_sequences)]
    for number, prompt in enumerate(prompts):
        engine.submit(engine.inputs.accept(str(number), prompt, params))
    in_use = 0
    while engine.has_unfinished_requests:
        engine.step()
        sequences = list(engine.scheduler.unfinished())
        if len(sequences) == case.num_sequences and all(each.num_uncomputed_tokens == 1 for each in sequences):
            in_use = engine.scheduler.block_pool.num_used
    resident = resident_memory() - before
    engine.submit(engine.inputs.accept("last", [*prompts[-1][: num_prompt_tokens // 2], 1, 2, 3], params))
    while engine.has_unfinished_requests:
        engine.step()
    executor = engine.runner.require_packed()
    block_bytes, specs = executor.bytes_per_block(llm.model_info.block_size), executor.specs
    kept = sum(
        min(case.num_tokens, spec.window or case.num_tokens) * executor.backend.bytes_per_block(spec) for spec in specs
    )
    least = case.num_sequences * kept // llm.model_info.block_size
    return Measured(least, in_use * block_bytes, resident, engine.stats().num_cached_tokens)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--output-folder", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    machine = "; ".join(f"{name}: {value}" for name, value in describe_machine().items())
    lines = [
        f"# Cache memory of windows at {arguments.tokens:,} tokens, bfloat16",
        "",
        "Gemma 3 1B: 22 layers with a window of 512, 4 without. Gemma 4 (default layers, narrow): 25 with a window of "
        f"512, 5 without, whose heads are twice as wide. Blocks of 16 tokens. {machine}.",
        "",
        "| shape | sequences | tokens a step | windows | least MiB | in use MiB | of the least | resident MiB | "
        "prefix found |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    cases = [
        Case(GEMMA_3_1B, 1, arguments.tokens, 2048),
        Case(GEMMA_3_1B, 1, arguments.tokens, 512),
        Case(GEMMA_3_1B, 1, arguments.tokens, 512, caches_prefixes=False),
        Case(GEMMA_3_1B, 4, arguments.tokens, 512),
        Case(GEMMA_3_1B, 1, arguments.tokens, 512, uses_windows=False),
        Case(GEMMA_4_NARROW, 1, arguments.tokens, 512),
        Case(GEMMA_4_NARROW, 4, arguments.tokens, 512),
        Case(GEMMA_4_NARROW, 1, arguments.tokens, 512, uses_windows=False),
    ]
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            case.shape.save(folder)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found = pool.submit(measure, folder, case).result()
            most_to_find = (case.num_tokens - NUM_DECODES) // 2
            prefix = f"{found.num_cached} of {most_to_find}" if case.caches_prefixes else "off"
            windows = "kept" if case.uses_windows else "ignored"
            mebibytes = (f"{size / MEBIBYTE:.1f}" for size in (found.least, found.in_use))
            lines.append(
                f"| {case.shape.name} | {case.num_sequences} | {case.budget} | {windows} | {' | '.join(mebibytes)} | "
                f"{found.in_use / found.least:.3f} | {found.resident / MEBIBYTE:.1f} | {prefix} |"
            )
            print(lines[-1], flush=True)
    text = "\n".join([*lines, ""])
    print(text)
    arguments.output_folder.mkdir(parents=True, exist_ok=True)
    (arguments.output_folder / "window-memory.md").write_text(text)


if __name__ == "__main__":
    main()
