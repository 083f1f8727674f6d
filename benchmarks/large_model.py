"""A model that would not fit in floats: the shape of Llama 3.1 8B in four bits, with random weights made directly so.

python -m benchmarks.large_model

Reported are the checkpoint's size, how long loading it takes (imports apart; its file has just been written, so it is
in the page cache), the peak of the process's memory, its own part of that (the file is mapped), and one stream of 128
tokens. `inflight profile` on the same folder says how far from the memory's floor a step is.
"""

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from inflight import LLM, SamplingParams
from inflight.execution.grouped.rounding import Rounding
from inflight.execution.grouped.weight import GroupedLayout, GroupedWeight, Groups
from inflight.execution.hf.packed_checkpoint import write_packed_checkpoint
from inflight.execution.kernels import kernels_available

CONFIG = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    dtype="bfloat16",
)
NUM_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=CONFIG.num_hidden_layers)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept; made if it is not there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary) / "model"
        if not folder.exists():  # written by another process, whose memory is not that of loading
            writer = multiprocessing.get_context("spawn").Process(target=write, args=(folder, given.layers))
            writer.start()
            writer.join()
            if writer.exitcode:
                sys.exit(f"the checkpoint was not written (exit code {writer.exitcode})")
        measure(folder)


def write(folder: Path, num_layers: int) -> None:
    """Write the checkpoint, layer by layer. Raises `RuntimeError` without kernels."""
    CONFIG.num_hidden_layers = num_layers
    if not kernels_available():
        raise RuntimeError("weights in groups need a C++ compiler")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(random_weight(*module.weight.shape), False)
        elif isinstance(module, nn.Embedding):
            values = torch.randn(module.weight.shape, dtype=torch.bfloat16)
            module.weight = nn.Parameter(Rounding(8).rounded(values, torch.bfloat16), False)
        elif "weight" in module._parameters:
            module.weight = nn.Parameter(torch.ones(module.weight.shape, dtype=torch.bfloat16), False)
    write_packed_checkpoint(model, folder)


def random_weight(num_outputs: int, num_inputs: int) -> GroupedWeight:
    """A weight in four bits with a scale for every 32 inputs."""
    numbers = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8)
    scales = torch.rand(num_outputs, num_inputs // 32).mul(0.01).half()
    groups = Groups(GroupedLayout(4, 32, middle=8), numbers, scales)
    return GroupedWeight.from_groups("int4", [groups], torch.bfloat16, is_stacked=False)


def measure(folder: Path) -> None:
    """Load the checkpoint, run one stream, and print what that took."""
    size = (folder / "model.safetensors").stat().st_size
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    llm = LLM(folder, max_num_seqs=1, max_model_len=4096, speculation="off")
    prompt = {"prompt_token_ids": list(range(100, 132))}
    llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    loaded = time.perf_counter() - start
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"file {size / 2**20:,.0f} MiB; to the first token {loaded:.1f} s; {llm.model_info.executor}")
    print(f"peak {peak / 2**20:,.0f} MiB, {before / 2**20:,.0f} of them before ({peak / size:.2f} times the file)")
    print("tokens/s of one stream: " + ", ".join(f"{NUM_TOKENS / each:.2f}" for each in seconds))


if __name__ == "__main__":
    main()
