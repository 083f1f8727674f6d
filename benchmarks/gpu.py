"""Offline throughput on one GPU: random weights in real shapes, random prompts, greedy, EOS ignored.

256 requests whose inputs and outputs are uniform in 100 to 1,024 tokens, as in nano-vllm's benchmark. Reports tokens
per second, peak memory, and the share of the memory roofline. That share is the time for reading all weights and the
visible keys and values once per step, at the bandwidth of a copy in the same run, divided by the duration of the run.

    python benchmarks/gpu.py --model qwen3-0.6b --output benchmarks/results/gpu-h200-qwen3-0.6b.json
"""

import argparse
import json
import platform
import random
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from inflight import LLM, SamplingParams
from inflight.contracts.step.record import StepRecord

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
COMMON = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}


def main() -> None:
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    config = AutoConfig.for_model("qwen3", **COMMON, **SHAPES[arguments.model])
    llm = LLM(random_model(config, device), max_num_seqs=arguments.max_num_seqs, max_model_len=2304, speculation="off")
    prompts, params = workload(arguments.num_requests, config)
    llm.generate(prompts[:8], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    roofline = Roofline(llm, measured_bandwidth(device))
    llm.engine.observer = roofline.observe
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert num_output_tokens == sum(p.max_tokens or 0 for p in params)
    result = {
        "model": arguments.model,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "attention_backend": llm.model_info.attention_backend,
        "num_requests": len(prompts),
        "num_prompt_tokens": sum(map(len, prompts)),
        "num_output_tokens": num_output_tokens,
        "num_steps": roofline.num_steps,
        "seconds": seconds,
        "output_tokens_per_second": num_output_tokens / seconds,
        "total_tokens_per_second": (num_output_tokens + sum(map(len, prompts))) / seconds,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "measured_bandwidth_gb_per_second": roofline.bandwidth / 1e9,
        "share_of_memory_roofline": roofline.floor_seconds / seconds,
    }
    print(json.dumps(result, indent=2))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="write the result to this file as JSON")
    return parser.parse_args()


def random_model(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """Make a model with seeded random weights in bfloat16 on the device."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def workload(num_requests: int, config: PreTrainedConfig) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return requests with prompts and outputs of 100 to 1,024 tokens."""
    rng = random.Random(0)
    prompts = [[rng.randrange(config.vocab_size) for _ in range(rng.randint(100, 1024))] for _ in range(num_requests)]
    lengths = [rng.randint(100, 1024) for _ in range(num_requests)]
    return prompts, [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]


def measured_bandwidth(device: torch.device, num_bytes: int = 2**30) -> float:
    """Return the bytes per second that the device reads and writes in a large copy (median of 20)."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(20):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * num_bytes / sorted(times)[len(times) // 2]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Roofline:
    """Adds up, step by step, the least time that reading weights and visible cache takes."""

    def __init__(self, llm: LLM, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self.num_steps = 0
        self.floor_seconds = 0.0
        model = llm.engine.runner.model
        embeddings = model.get_input_embeddings().weight
        tied = model.get_output_embeddings().weight is embeddings
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        # A step reads only a few rows of an input embedding, unless it is also the output head.
        self._weight_bytes = num_bytes if tied else num_bytes - embeddings.numel() * embeddings.element_size()
        self._bytes_per_token = llm.model_info.kv_bytes_per_token

    def observe(self, record: StepRecord) -> None:
        """Count one step."""
        visible = sum(span.start + span.length for span in record.spans)
        self.num_steps += 1
        self.floor_seconds += (self._weight_bytes + visible * self._bytes_per_token) / self.bandwidth


if __name__ == "__main__":
    main()
