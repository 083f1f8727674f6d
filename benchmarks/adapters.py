"""What adapters cost: 32 sequences with 32 different adapters against the same sequences without, side by side.

    python -m benchmarks.adapters gpt2 qwen3-0.6b --rank 16

Random adapters of one rank, for the layers that PEFT takes by default and for all linear ones. Both ways run in turn in
one engine: of two engines in a process, the one that is made later is up to a tenth faster. Reported are medians of
tokens a second over rounds, and the median of the ratios of neighbouring rounds with two standard errors of its mean.
"""

import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import click
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from benchmarks.peers.models import model_folder
from inflight import LLM, SamplingParams
from inflight.observe.recorder import describe_machine

DEFAULT_TARGETS = {"gpt2": ("c_attn",), "qwen3": ("q_proj", "v_proj")}
"""What PEFT adapts if it is not told, by model type."""
NUM_SEQUENCES, PROMPT_LEN, NUM_TOKENS = 32, 32, 96


def write_adapter(folder: Path, shapes: dict[str, tuple[int, int]], rank: int, seed: int) -> None:
    """A random adapter in PEFT's format, for layers with this many inputs and outputs."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (num_inputs, num_outputs) in shapes.items():
        for letter, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            key = f"base_model.model.{name}.lora_{letter}.weight"
            tensors[key] = 0.02 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))


def shapes_of(folder: str, targets: tuple[str, ...] | None) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of a model's linear layers whose names end so; None: of all but the head."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    head, shapes = model.get_output_embeddings(), {}
    for name, module in model.named_modules():
        if module is not head and (targets is None or name.endswith(targets)):
            if isinstance(module, nn.Linear):
                shapes[name] = module.in_features, module.out_features
            elif isinstance(module, Conv1D):
                shapes[name] = module.nx, module.nf
    return shapes


def tokens_per_second(llm: LLM, adapter: list[str] | None) -> float:
    """Of the steps in which all sequences decode."""
    prompts = [[7 * number + 3 + place for place in range(PROMPT_LEN)] for number in range(NUM_SEQUENCES)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    deltas = llm.stream(prompts, params, adapter=adapter)
    times = [time.perf_counter() for delta in deltas if delta.prompt_index == 0]
    return NUM_SEQUENCES * (len(times) - 1) / (times[-1] - times[0])


@click.command()
@click.argument("models", nargs=-1)
@click.option("--rank", default=16)
@click.option("--rounds", default=8)
def main(models: tuple[str, ...], rank: int, rounds: int) -> None:
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    for model in models:
        for all_linear in (False, True):
            report(model, rank, rounds, all_linear=all_linear)


def report(model: str, rank: int, rounds: int, *, all_linear: bool) -> None:
    """Measure one model with one set of layers."""
    folder = str(model_folder(model))
    kind = AutoConfig.from_pretrained(folder).model_type
    shapes = shapes_of(folder, None if all_linear else DEFAULT_TARGETS[kind])
    with tempfile.TemporaryDirectory() as place:
        adapters = {}
        for number in range(NUM_SEQUENCES):
            adapters[f"adapter-{number}"] = f"{place}/{number}"
            write_adapter(Path(place, str(number)), shapes, rank, number)
        make = partial(LLM, folder, max_num_seqs=NUM_SEQUENCES, speculation="off", enable_prefix_caching=False)
        adapted = make(adapters=adapters, adapter_memory=2**33)
        ways = {
            "without adapters": lambda: tokens_per_second(adapted, None),
            "with 32 adapters": lambda: tokens_per_second(adapted, list(adapters)),
        }
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for name in [*ways, *list(ways) * rounds]:
            speeds[name].append(ways[name]())
        info = adapted.model_info
        num_bytes = adapted.engine.inputs.adapters.num_bytes / NUM_SEQUENCES
    print(
        f"{model}, {info.dtype}, rank {rank}, {'all linear layers' if all_linear else ', '.join(DEFAULT_TARGETS[kind])}"
    )
    print(f"  an adapter takes {num_bytes / 2**20:.1f} MiB; {info.forward_pass}")
    first = speeds["without adapters"][1:]
    for name, each in speeds.items():
        ratios = [own / before for own, before in zip(each[1:], first, strict=True)]
        error = 2 * statistics.stdev(ratios) / len(ratios) ** 0.5
        print(
            f"  {name:30} {statistics.median(each[1:]):8.1f} tokens/s   {statistics.median(ratios):.3f} ± {error:.3f}"
        )


if __name__ == "__main__":
    main()
