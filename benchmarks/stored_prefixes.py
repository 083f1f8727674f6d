"""What a folder of prefixes gains and costs: `prefix_cache_dir` against computing, in one process.

python -m benchmarks.stored_prefixes --model qwen3-0.6b --dtype bfloat16 --measure first-token,beside,idle

- `first-token`: seconds to the first token of a 4,096-token prompt, computed, and restored by an engine that was
  started again, with the files out of the system's memory (as far as it lets go of them); and if it is installed, of
  llama.cpp's server, which saves and restores a slot, in turn.
- `beside`: seconds between the tokens of eight decodes: alone, while prompts are restored beside them, and while
  everything that was computed before is saved.
- `idle`: tokens a second of the workload W2-32 with a folder that is never hit, and without one.
"""

import argparse
import http.client
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.catalogue import PEERS
from benchmarks.peers.models import model_folder, prepare
from benchmarks.workloads import WORKLOADS
from inflight import LLM, SamplingParams
from inflight.prefix_store import prefix_store

PROMPT_LENGTH, NUM_DECODES, NUM_STEPS = 4096, 8, 300
SECONDS_BEFORE = 3.0
"""Between an engine's start and its first prompt."""
ONE = SamplingParams(temperature=0, max_tokens=1)
FOREVER, LARGE = 600.0, 2**36


def open_llm(folder: Path | None, arguments: argparse.Namespace, **others: Any) -> LLM:
    """An engine with an empty cache of its own, with or without a folder."""
    memory = arguments.cache_gib * 2**30
    options: dict[str, Any] = {"dtype": arguments.dtype, "speculation": "off", "kv_cache_memory": memory}
    if arguments.quantization:
        options["quantization"] = arguments.quantization
    return LLM(model_folder(arguments.model), prefix_cache_dir=folder, prefix_cache_size=LARGE, **options, **others)


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
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_token(arguments: argparse.Namespace, folder: Path) -> None:
    """Print how long the first token of a long prompt takes."""
    seconds = defaultdict[str, list[float]](list)
    llamacpp = PEERS["llamacpp"]
    for number in range(arguments.rounds):
        llm = open_llm(folder, arguments)
        llm.generate([prompt_of(-1, 64)], ONE, use_tqdm=False)  # both begin warm
        start = time.perf_counter()
        (expected,) = llm.generate([prompt_of(number)], ONE, use_tqdm=False)
        seconds["computed"].append(time.perf_counter() - start)
        flush(llm)
        del llm
        let_go_of_files(folder)
        llm = open_llm(folder, arguments)
        time.sleep(SECONDS_BEFORE)
        llm.generate([prompt_of(-2, 64)], ONE, use_tqdm=False)
        start = time.perf_counter()
        (output,) = llm.generate([prompt_of(number)], ONE, use_tqdm=False)
        seconds["restored"].append(time.perf_counter() - start)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert llm.engine.scheduler.persistence.num_restored_tokens >= PROMPT_LENGTH - 16
        del llm
        if llamacpp.is_installed:
            weights = prepare(llamacpp, model_folder(arguments.model), arguments.dtype, arguments.quantization)
            for name, each in slot_times(llamacpp.root, weights, prompt_of(number)["prompt_token_ids"], folder).items():
                seconds[name].append(each)
    median = {name: statistics.median(each) for name, each in seconds.items()}
    print(f"first token of {PROMPT_LENGTH} tokens, medians of {arguments.rounds}:")
    for name, each in median.items():
        print(f"{name}: {each:.2f} s ({each / median['restored']:.1f})")


def slot_times(root: Path, weights: Path, prompt_token_ids: list[int], folder: Path) -> dict[str, float]:
    """Seconds that llama.cpp's server takes for the first token of a prompt, computed, and restored after a restart."""
    seconds = {}
    with llama_server(root, weights, folder) as ask:
        ask("/completion", {"prompt": prompt_token_ids[:64], "n_predict": 1})
        start = time.perf_counter()
        ask("/completion", {"prompt": prompt_token_ids, "n_predict": 1})
        seconds["llama.cpp, computed"] = time.perf_counter() - start
        ask("/slots/0?action=save", {"filename": "slot"})
    let_go_of_files(folder)
    with llama_server(root, weights, folder) as ask:
        ask("/completion", {"prompt": prompt_token_ids[:64], "n_predict": 1})
        start = time.perf_counter()
        ask("/slots/0?action=restore", {"filename": "slot"})
        answer = ask("/completion", {"prompt": prompt_token_ids, "n_predict": 1})
        seconds["llama.cpp, restored"] = time.perf_counter() - start
        assert answer["timings"]["prompt_n"] < 64, answer["timings"]
    return seconds


@contextmanager
def llama_server(root: Path, weights: Path, folder: Path) -> Iterator[Callable[[str, object], dict[str, Any]]]:
    """A server of llama.cpp with one slot; gives a function that posts to it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options: list[object] = ["--port", port, "-np", 1, "-c", PROMPT_LENGTH + 256, "-t", os.cpu_count()]
    if "amx_int8" in Path("/proc/cpuinfo").read_text():
        options.append("--no-repack")  # see `benchmarks/peers/llamacpp_server.py`
    command = [root / "build" / "bin" / "llama-server", "-m", weights, "--slot-save-path", folder, *options]
    process = subprocess.Popen([str(each) for each in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def post(path: str, body: object) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}: {answer}")
        return answer

    try:
        is_ready = False
        while not is_ready:
            if process.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {process.returncode}")
            time.sleep(0.2)
            with suppress(OSError, RuntimeError):
                post("/tokenize", {"content": ""})
                is_ready = True
        time.sleep(SECONDS_BEFORE)
        yield post
    finally:
        process.terminate()
        process.wait()


def decode_times(llm: LLM, prompts: list[dict[str, Any]], goes_on: Callable[[], bool] | None = None) -> list[float]:
    """Seconds of each step in which eight sequences decode, while these prompts come in beside them, and as long as
    `goes_on`."""
    engine = llm.engine
    decoding = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
    seconds: list[float] = []
    is_first = True
    while is_first or (goes_on is not None and goes_on()):
        for number in range(NUM_DECODES):
            prompt = prompt_of(1000 + number + random.randrange(10**6), 64)["prompt_token_ids"]
            engine.submit(engine.inputs.accept(f"decode {number}", prompt, decoding))
        engine.step()
        for number, prompt in enumerate(prompts if is_first else []):
            engine.submit(engine.inputs.accept(f"prompt {number}", prompt["prompt_token_ids"], ONE))
        is_first, num_decoding = False, NUM_DECODES
        while num_decoding:
            counts, start = goes_on is None or goes_on(), time.perf_counter()
            outputs = [each for each in engine.step() if each.request_id.startswith("decode")]
            if counts and len(outputs) == NUM_DECODES:
                seconds.append(time.perf_counter() - start)
            num_decoding -= sum(each.finish_reason is not None for each in outputs)
    return seconds


def beside(arguments: argparse.Namespace, folder: Path) -> None:
    """Print what restoring and saving do to others."""
    # Of each, one token is left to compute.
    prompts = [prompt_of(number, PROMPT_LENGTH + 1) for number in range(-(-arguments.tokens // PROMPT_LENGTH))]
    llm = open_llm(folder, arguments)
    share, prefix_store.SHARE_OF_SAVING = prefix_store.SHARE_OF_SAVING, 1e-6  # save nothing yet
    llm.generate(prompts, ONE, use_tqdm=False)
    prefix_store.SHARE_OF_SAVING = share
    store = llm.engine._store
    assert store is not None
    saved_before = store.num_saved
    most_saved = saved_before + arguments.tokens // llm.engine.config.kv_cache.block_size
    saving = decode_times(llm, [], lambda: store.num_saved < most_saved)
    num_saved = store.num_saved - saved_before
    flush(llm)
    alone = decode_times(llm, [])
    flush(llm)
    del llm
    let_go_of_files(folder)
    llm = open_llm(folder, arguments)
    llm.generate([prompt_of(-1, 64)], ONE, use_tqdm=False)
    alone += decode_times(llm, [])
    restoring = decode_times(llm, prompts, lambda: llm.engine.scheduler.persistence.is_waiting)
    num_restored = llm.engine.scheduler.persistence.num_restored_tokens
    print(f"while decoding, {num_saved} blocks were saved, {num_restored} tokens restored")
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
    parser.add_argument("--tokens", type=int, default=100_000, help="restored and saved beside decodes")
    parser.add_argument("--cache-gib", type=int, default=13, help="memory for keys and values: all of these tokens'")
    arguments = parser.parse_args()
    for name in arguments.measure.split(","):
        folder = Path(tempfile.mkdtemp(prefix="prefixes-"))
        try:
            MEASURES[name](arguments, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # an engine that has ended may still save


if __name__ == "__main__":
    main()
