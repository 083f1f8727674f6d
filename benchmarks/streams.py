"""Many concurrent streams of `AsyncLLM`, embedded model in bfloat16: tokens per second, and the cost for the caller.

python benchmarks/streams.py
"""

import asyncio
import resource
import time

from inflight import AsyncLLM, SamplingParams

NUM_STREAMS = (100, 500, 2000)
NUM_TOKENS = 24


async def main() -> None:
    async with AsyncLLM(dtype="bfloat16", max_num_seqs=64) as llm:
        await read(llm, 0)
        for num_streams in NUM_STREAMS:
            start, start_of_process = time.perf_counter(), time.process_time()
            num_tokens = sum(await asyncio.gather(*(read(llm, seed) for seed in range(num_streams))))
            seconds = time.perf_counter() - start
            per_token = (time.process_time() - start_of_process) / num_tokens
            print(
                f"{num_streams:5} streams: {num_tokens / seconds:.0f} tokens/s, "
                f"{per_token * 1e6:.0f} us of the caller's processor a token, "
                f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"
            )
        stats = await llm.stats()
        print(f"left behind: {stats.num_running + stats.num_waiting} requests, {stats.num_blocks_used} blocks in use")


async def read(llm: AsyncLLM, seed: int) -> int:
    """Read one stream to its end; return the number of its tokens."""
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True)
    return sum([len(delta.token_ids) async for delta in llm.stream("Once upon a time", params)])


if __name__ == "__main__":
    asyncio.run(main())
