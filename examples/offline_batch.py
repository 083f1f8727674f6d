"""Answer many prompts at once, in this process.

    python examples/offline_batch.py                       # the embedded model
    python examples/offline_batch.py ./my-model            # a folder, a GGUF file or a hub id

All prompts are given in one call; the engine decides step by step which of them run. Each prompt may have
`SamplingParams` of its own. Results come in the order of the prompts.
"""

import sys
import time

from inflight import LLM, SamplingParams

PROMPTS = {
    "Once upon a time": SamplingParams(temperature=0, max_tokens=60),
    "In a quiet village": SamplingParams(temperature=0, max_tokens=20),
    "One morning": SamplingParams(temperature=0.8, seed=1, max_tokens=40),
    "Long ago": SamplingParams(temperature=0.8, seed=2, max_tokens=40, n=2),
}


def main() -> None:
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None)
    start = time.monotonic()
    outputs = llm.generate(list(PROMPTS), list(PROMPTS.values()), use_tqdm=False)
    seconds = time.monotonic() - start

    for output in outputs:
        for completion in output.outputs:
            print(f"[{completion.finish_reason}, {len(completion.token_ids)} tokens] {output.prompt}{completion.text}")
    num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    print(f"{num_tokens} tokens in {seconds:.2f} s, {llm.stats().num_steps} steps")


if __name__ == "__main__":
    main()
