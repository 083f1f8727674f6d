"""Random requests on engines that start again and again over one folder, whose files are damaged meanwhile, compared
bit by bit with an engine without a folder.

python -m tests.prefix_store.soak --requests 1_000 --seed 1
"""

import argparse
import logging
import random
import tempfile
from pathlib import Path
from typing import Any

from inflight import LLM
from tests.speculation.random_requests import generate, random_requests, said

AT_ONCE, NUM_STARTS = 20, 5
LONG = 600.0
SHARES_DAMAGED, SHARE_OF_OTHERS = (0.05, 0.2, 1.0), 0.2
BEGINNINGS = [
    text * 20
    for text in ("Tom had a red ball. He liked it. ", "One day a cat saw a dog in the park. ", "Lily was sad. ")
]


def damage(folder: Path, rng: random.Random) -> int:
    """Change a part of the files, their names or their lengths, and now and then the files beside them; return how
    many."""
    paths = [each for each in sorted(folder.glob("*/??/*")) if each.is_file()]
    chosen = rng.sample(paths, int(len(paths) * rng.choice(SHARES_DAMAGED)))
    others = [each for each in folder.rglob("*") if each.is_file() and each not in paths]
    chosen += rng.sample(others, int(rng.random() < SHARE_OF_OTHERS))
    for path in chosen:
        if not path.is_file():  # it was renamed, or is a link to what was
            continue
        data = bytearray(path.read_bytes())
        place = rng.randrange(len(data) + 1)
        match rng.randrange(8 if path in paths else 5):  # a key that is a folder is no folder of prefixes
            case 0:
                data[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[place:]
            case 2:
                data[place:place] = rng.randbytes(rng.randint(1, 100))
            case 3:
                data[place : place + 64] = bytes(len(data[place : place + 64]))
            case 4:
                if not (other := rng.choice(paths)).is_dir():
                    path.rename(other)
                continue
            case 5:
                path.unlink()
                path.mkdir()
                continue
            case 6:
                path.unlink()
                path.symlink_to(rng.choice([*paths, folder / "nowhere"]))
                continue
            case 7:
                path.chmod(rng.choice([0o000, 0o400, 0o777]))
                continue
        path.write_bytes(data)
    return len(chosen)


def main() -> None:
    """Compare, and print what differed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # a line for each damaged file
    rng = random.Random(arguments.seed)
    num_done = num_different = num_restored = num_damaged = num_preemptions = 0
    while num_done < arguments.requests:
        options: dict[str, Any] = {
            "dtype": rng.choice(["float32", "bfloat16"]),
            "kv_cache_dtype": rng.choice(["auto", "int8", "int4"]),
            "num_blocks": rng.choice([120, 200, 4000]),
            "block_size": rng.choice([4, 16]),
            "max_num_seqs": rng.choice([1, 4, 32]),
            "max_num_batched_tokens": rng.choice([16, 64, 2048]),
        }
        prompts, params = random_requests(AT_ONCE, rng.random())
        prompts = [rng.choice(BEGINNINGS)[: rng.randint(0, 400)] + prompt for prompt in prompts]
        expected = generate(LLM(**options), prompts, params)
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(NUM_STARTS):
                llm = LLM(**options, prefix_cache_dir=folder, prefix_cache_size=rng.choice([10**6, 10**8]))
                store = llm.engine._store
                assert store is not None
                if rng.random() < 0.7:
                    store.is_faster = lambda num_blocks, num_states, num_tokens: True  # type: ignore[method-assign]
                for output, wanted, each in zip(generate(llm, prompts, params), expected, params, strict=True):
                    if said(output) != said(wanted):
                        num_different += 1
                        print("different:", options, each, output, wanted)
                llm.engine.save_prefixes(LONG)
                llm.engine.scheduler.block_pool.check([])
                stats = llm.engine.stats()
                num_restored += stats.num_restored_tokens
                num_preemptions += stats.num_preemptions
                num_done += AT_ONCE
                num_damaged += damage(Path(folder), rng)
        print(
            f"{num_done:,} requests, {num_restored:,} restored tokens, {num_damaged:,} damaged files, "
            f"{num_preemptions:,} preemptions: {num_different} differ",
            flush=True,
        )


if __name__ == "__main__":
    main()
