"""Thousands of random requests with and without draft tokens, compared bit by bit.

python -m tests.speculation.soak --requests 10_000 --seed 1
"""

import argparse
import random

from inflight import LLM
from inflight.demo_model import DEMO_MODEL
from tests.speculation.oracle import Oracle, make_it_ask, make_rows_free
from tests.speculation.random_requests import generate, random_requests, said, sequences

AT_ONCE = 100


def main() -> None:
    """Compare, and print what differed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    num_different = num_done = num_draft_tokens = num_accepted = num_preemptions = 0
    while num_done < arguments.requests:
        options = {
            "dtype": rng.choice(["float32", "bfloat16"]),
            "num_blocks": rng.choice([40, 100, 4000]),
            "block_size": rng.choice([4, 16]),
            "max_num_seqs": rng.choice([1, 4, 32]),
            "max_num_batched_tokens": rng.choice([16, 64, 2048]),
            "policy": rng.choice(["fcfs", "priority"]),
        }
        plain = LLM(**options, speculation="off")
        drafters = rng.choice([{}, {"speculation": "lookup"}, {"speculation": "grammar"}, {"draft_model": DEMO_MODEL}])
        speculating = LLM(**options, **drafters)
        if rng.random() < 0.5:
            make_rows_free(speculating.engine)
        asks_an_oracle = rng.random() < 0.5
        for _ in range(5):
            prompts, params = random_requests(AT_ONCE, rng.random())
            expected = generate(plain, prompts, params)
            if asks_an_oracle:
                share, most = rng.choice([0.3, 0.7, 1.0]), rng.choice([1, 3, 16, 40])
                oracle = Oracle(sequences(expected), speculating.engine.model_info.vocab_size, share)
                make_it_ask(speculating.engine, oracle, most)
            outputs = generate(speculating, prompts, params)
            for output, wanted, each in zip(outputs, expected, params, strict=True):
                if said(output) != said(wanted):
                    num_different += 1
                    print("different:", options, each, output, wanted)
            num_done += AT_ONCE
        stats = speculating.engine.stats()
        num_draft_tokens += stats.num_draft_tokens
        num_accepted += stats.num_accepted_tokens
        num_preemptions += stats.num_preemptions
        print(
            f"{num_done:,} requests, {num_draft_tokens:,} draft tokens, {num_accepted:,} right, "
            f"{num_preemptions:,} preemptions: {num_different} differ",
            flush=True,
        )


if __name__ == "__main__":
    main()
