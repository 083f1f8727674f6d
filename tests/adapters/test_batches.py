"""A sequence's bits depend on its adapter and its tokens alone: not on who else runs, nor on their adapters. Without an
adapter they are those of an engine that has none."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight import LLM, SamplingParams
from inflight.contracts.api.outputs import RequestOutput
from tests import zoo
from tests.adapters.made import modules_of, save_with_peft, write_adapter
from tests.execution import this_cpu

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "int4 exact": {"dtype": "bfloat16", "quantization": "int4", "quantization_arithmetic": "exact"},
}
CASES = [
    *(("llama", precision) for precision in PRECISIONS),
    ("gpt2", "bfloat16"),  # layers with an activation of their own
    ("qwen3_moe", "bfloat16"),
]
PARAMS = SamplingParams(temperature=0, max_tokens=10, logprobs=0, ignore_eos=True)
NUM_ADAPTERS = 5


@pytest.mark.parametrize(("name", "precision"), CASES)
@pytest.mark.thorough("llama-float32", "llama-int4]")
def test_bits_do_not_depend_on_company(name: str, precision: str, tmp_path: Path) -> None:
    options = PRECISIONS[precision]
    this_cpu.needs(getattr(torch, options["dtype"]))
    zoo.build(name).save_pretrained(tmp_path / "model")
    rng, adapters = random.Random(name + precision), {}
    for number in range(NUM_ADAPTERS):
        adapters[str(number)] = str(tmp_path / str(number))
        targets = "all-linear" if number % 2 else {"gpt2": ["c_attn", "c_fc"]}.get(name, ["q_proj", "v_proj"])
        save_with_peft(
            zoo.build(name), tmp_path / str(number), number, r=rng.choice((1, 4, 16)), target_modules=targets
        )
    folder = str(tmp_path / "model")
    alone = LLM(folder, adapters=adapters, max_num_seqs=1, enable_prefix_caching=False, **options)
    together = LLM(folder, adapters=adapters, max_num_seqs=9, max_num_batched_tokens=29, **options)
    without = LLM(folder, max_num_seqs=1, enable_prefix_caching=False, **options)
    prompts = [[rng.randrange(zoo.VOCAB_SIZE) for _ in range(rng.choice((1, 5, 16, 33, 50)))] for _ in range(16)]
    wanted = [rng.choice([None, *adapters]) for _ in prompts]
    expected = alone.generate(prompts, PARAMS, use_tqdm=False, adapter=wanted)
    given = together.generate(prompts, PARAMS, use_tqdm=False, adapter=wanted)
    plain = without.generate(prompts, PARAMS, use_tqdm=False)
    assert [scored(each) for each in given] == [scored(each) for each in expected]
    for adapter, output, other in zip(wanted, expected, plain, strict=True):
        assert (scored(output) == scored(other)) is (adapter is None)


def test_a_fork_and_draft_tokens_have_the_adapter_of_their_prompt(tmp_path: Path) -> None:
    """Siblings share the prompt's blocks, and draft tokens run with the sequence's adapter."""
    model = zoo.build("llama")
    adapters = {"a": write_adapter(tmp_path / "a", modules_of(model, "q_proj", "down_proj"), 1)}
    prompt = [1, 2, 3, 4, 5, 6, 7, 8] * 5
    params = SamplingParams(n=3, temperature=1, seed=5, max_tokens=24, logprobs=0, ignore_eos=True)
    speculating = LLM(model, adapters=adapters, speculation="lookup", block_size=4)
    plain = LLM(model, adapters=adapters, speculation="off", block_size=4, max_num_seqs=1)
    (given,) = speculating.generate([prompt], params, use_tqdm=False, adapter="a")
    (expected,) = plain.generate([prompt], params, use_tqdm=False, adapter="a")
    assert scored(given) == scored(expected)


def scored(output: RequestOutput) -> list[tuple[list[int], list[float]]]:
    """The tokens of each sequence, and their log-probabilities to the last bit."""
    assert output.error is None
    return [
        (
            each.token_ids,
            [scores[token].logprob for token, scores in zip(each.token_ids, each.logprobs or [], strict=True)],
        )
        for each in output.outputs
    ]
