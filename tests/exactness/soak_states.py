"""Random requests to tiny models with recurrent states, alone and in any company, compared bit by bit.

python -m tests.exactness.soak_states --requests 10_000 --seed 1

Alone, each request runs by itself over blocks of the same size, without draft tokens and prefix cache. Then prompts
share beginnings, continue earlier answers, and come in chunks; sequences are preempted; draft tokens are right or
wrong; a folder has prefixes.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence

from transformers import PreTrainedModel

from inflight import LLM, SamplingParams
from inflight.census.sensitive import sensitive_model
from inflight.census.tiny_configs import model_class, tiny_config
from inflight.contracts.api.outputs import RequestOutput
from tests.speculation.oracle import Oracle, make_it_ask, make_rows_free
from tests.speculation.random_requests import said, sequences

FAMILIES = ("qwen3_next", "qwen3_5_text", "kimi_linear", "falcon_h1", "granitemoehybrid", "mamba", "mamba2", "lfm2")
AT_ONCE, ROUNDS = 25, 5


def random_prompts(rng: random.Random, turns: Sequence[list[int]], vocab_size: int) -> list[list[int]]:
    """Some begin alike, and some continue what was said before."""
    beginnings = [[rng.randrange(vocab_size) for _ in range(rng.choice([3, 20, 70]))] for _ in range(2)]
    made = []
    for _ in range(AT_ONCE):
        begin = rng.choice([*beginnings, *turns[-8:]])
        begin = begin[: rng.choice([len(begin), rng.randint(1, len(begin))])][:120]
        made.append([*begin, *(rng.randrange(vocab_size) for _ in range(rng.choice([1, 2, 9])))])
    return made


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.3]),
        max_tokens=rng.choice([1, 4, 12, 30]),
        seed=rng.randrange(1 << 30),
        n=rng.choice([1, 1, 1, 3]),
        logprobs=rng.choice([None, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        ignore_eos=True,
    )


def generate(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    outputs: list[RequestOutput] = llm.generate(list(prompts), list(params), use_tqdm=False)
    return outputs


def compare(model: PreTrainedModel, rng: random.Random, folder: str) -> tuple[int, int, int, int]:
    """Run some rounds in one setting; return how many requests ran and how many differ, preemptions, and draft tokens
    that were right."""
    dtype = rng.choice(["float32", "float32", "bfloat16"])
    layout = {"dtype": dtype, "block_size": rng.choice([4, 16])}
    alone = LLM(model, **layout, speculation="off", enable_prefix_caching=False, max_num_seqs=1, num_blocks=100)
    options = {
        "num_blocks": rng.choice([60, 120, 2000]),
        "max_num_seqs": rng.choice([2, 5, 16]),
        "max_num_batched_tokens": rng.choice([8, 24, 64, 2048]),
    }
    together = LLM(model, **layout, **options, **rng.choice([{}, {"prefix_cache_dir": folder}]))
    make_rows_free(together.engine)
    turns: list[list[int]] = [[5, 6]]
    num_done = num_different = 0
    vocab_size = together.model_info.vocab_size
    for _ in range(ROUNDS):
        prompts, params = random_prompts(rng, turns, vocab_size), [random_params(rng) for _ in range(AT_ONCE)]
        expected = generate(alone, prompts, params)
        oracle = Oracle(sequences(expected), vocab_size, rng.choice([0.3, 0.7, 1.0]))
        make_it_ask(together.engine, oracle, rng.choice([1, 3, 16]))
        outputs = generate(together, prompts, params)
        for prompt, output, wanted, each in zip(prompts, outputs, expected, params, strict=True):
            if said(output) != said(wanted):
                num_different += 1
                print("differs:", type(model).__name__, layout, options, prompt, each)
        turns += sequences(expected)
        num_done += len(prompts)
    stats = together.engine.stats()
    return num_done, num_different, stats.num_preemptions, stats.num_accepted_tokens


def main() -> None:
    """Compare, and print what differed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    arguments = parser.parse_args()
    for name in arguments.families:
        rng, totals = random.Random(f"{name}/{arguments.seed}"), (0, 0, 0, 0)
        model, _ = sensitive_model(model_class(name), tiny_config(name))
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # which is still written to
            while totals[0] * len(arguments.families) < arguments.requests:
                found = compare(model, rng, folder)
                totals = tuple(map(sum, zip(totals, found, strict=True)))  # type: ignore[assignment]
        print(
            f"{name}: {totals[0]:,} requests, {totals[2]:,} preemptions, {totals[3]:,} draft tokens right: {totals[1]} "
            "differ",
            flush=True,
        )


if __name__ == "__main__":
    main()
