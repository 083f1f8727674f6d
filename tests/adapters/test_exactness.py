"""A sequence with an adapter gets the output of the plain model with that adapter merged, and sequences without one the
output of the plain model, all in the same steps."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inflight import LLM, SamplingParams
from inflight.contracts.api.outputs import RequestOutput
from tests import others, zoo
from tests.adapters.made import save_with_peft

TOLERANCE = 2e-5  # of the range of the reference's log-probabilities
ALL = "all-linear"
CASES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "llama": ("llama", [{"r": 1, "target_modules": ALL}, {"r": 8, "target_modules": ["q_proj", "v_proj"]}]),
    "gpt2": (
        "gpt2",
        [
            {"r": 16, "target_modules": ["c_attn"], "fan_in_fan_out": True},
            {"r": 3, "target_modules": ["c_fc", "c_proj"], "use_rslora": True, "fan_in_fan_out": True},
        ],
    ),
    "qwen3": (
        "qwen3",
        [
            {"r": 64, "target_modules": ["gate_proj", "k_proj", "down_proj"], "lora_alpha": 5},
            {
                "r": 2,
                "target_modules": ALL,
                "rank_pattern": {"q_proj": 7},
                "alpha_pattern": {"layers.1.mlp.up_proj": 9},
            },
        ],
    ),
    "phi3": (
        "phi3",
        [{"r": 8, "target_modules": ["qkv_proj", "gate_up_proj"]}, {"r": 5, "target_modules": ["o_proj"]}],
    ),
    "opt": ("opt", [{"r": 8, "target_modules": ALL}, {"r": 8, "target_modules": ["fc1"], "layers_to_transform": [1]}]),
    "gpt_neox": ("gpt_neox", [{"r": 32, "target_modules": ["query_key_value", "dense_h_to_4h"]}]),
    "qwen3_moe": (
        "qwen3_moe",
        [
            {"r": 4, "target_modules": ALL},
            {"r": 8, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
        ],
    ),
    "gpt_oss": (
        "gpt_oss",
        [{"r": 4, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}],
    ),
    "deepseek_v3": ("deepseek_v3", [{"r": 4, "target_modules": ALL}]),
    "qwen3_next": ("qwen3_next", [{"r": 4, "target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj"]}]),
    "lfm2": ("lfm2", [{"r": 4, "target_modules": ["in_proj", "out_proj", "w1"]}]),
    "its embedding": ("gpt2", [{"r": 4, "target_modules": ["wte", "c_attn"], "fan_in_fan_out": True}]),
    "an embedding that scales": ("gemma3", [{"r": 8, "target_modules": ["embed_tokens", "up_proj"]}]),
    "embedding and head": ("qwen3", [{"r": 4, "target_modules": ["embed_tokens", "lm_head", "o_proj"]}]),
}
"""A model, and what its adapters change."""
TIED = ("its embedding", "an embedding that scales")
"""PEFT merges into the head, too, what was trained for the embedding alone: the definition is the model unmerged."""
SCARCE = {"max_num_seqs": 5, "max_num_batched_tokens": 33, "num_blocks": 60, "block_size": 4}
"""Prompts run in chunks, and sequences are preempted."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.thorough("llama", "qwen3_moe", "its embedding")
def test_adapters_give_what_the_merged_model_gives(case: str, tmp_path: Path) -> None:
    name, choices = CASES[case]
    plain = zoo.build(name) if name in zoo.ARCHITECTURES else others.build(name)
    rng = random.Random(case)
    models: dict[str | None, nn.Module] = {None: plain}
    for number, options in enumerate(choices):
        folder = tmp_path / str(number)
        models[f"adapter {number}"] = save_with_peft(plain, folder, number, is_merged=case not in TIED, **options)
    adapters = {f"adapter {number}": str(tmp_path / str(number)) for number in range(len(choices))}
    llm = LLM(plain, adapters=adapters, **SCARCE)
    assert llm.model_info.executor == "packed"
    prompts = [
        [rng.randrange(zoo.VOCAB_SIZE) for _ in range(rng.choice((1, 2, 15, 16, 17, 40, 70)))] for _ in range(18)
    ]
    wanted = [list(models)[number % len(models)] for number in range(len(prompts))]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
    for output, adapter in zip(llm.generate(prompts, params, use_tqdm=False, adapter=wanted), wanted, strict=True):
        check_against(models[adapter], output)


def check_against(model: nn.Module, output: RequestOutput) -> None:
    """Every token is the likeliest, and has the log-probability that the model gives it."""
    prompt, completion = output.prompt_token_ids, output.outputs[0]
    assert output.error is None
    assert completion.logprobs is not None
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *completion.token_ids]]), use_cache=False).logits[0]
    reference = logits[len(prompt) - 1 : -1].log_softmax(-1)
    spread = float(reference.max() - reference.min())
    for row, token_id, scores in zip(reference, completion.token_ids, completion.logprobs, strict=True):
        assert abs(float(row[token_id]) - scores[token_id].logprob) <= TOLERANCE * spread
        assert float(row.max() - row[token_id]) <= TOLERANCE * spread
