"""The operations of the state machine, driven by `random` at full speed for far longer than a test may run.

python -m tests.properties.soak --seed 1 --operations 1_000_000
"""

import argparse
import platform
import random
import time
from collections import Counter

from inflight.contracts.api.config import BACKGROUND
from tests.properties.expected import Sizes
from tests.properties.invariants import check
from tests.properties.world import World

OPERATIONS_PER_WORLD = 300
VOCABULARY = 3


def random_sizes(rng: random.Random) -> Sizes:
    """Sizes so small that every resource runs out frequently."""
    budget = rng.randint(1, 24)
    windows = rng.choice([(None,), (None,), (None, rng.randint(1, 8)), (None, 3, 3), (rng.randint(1, 8),), (6, 11)])
    sharing = windows != (None,) or rng.random() < 0.7
    return Sizes(
        windows=windows,
        sharing=sharing,
        num_states=rng.choice([0, 0, rng.randint(2, 24)]) if sharing else 0,
        num_blocks=rng.randint(1, 16) * len(windows),
        block_size=rng.randint(1, 5),
        max_num_seqs=rng.randint(1, 7),
        budget=budget,
        max_prefill=rng.choice([None, None, rng.randint(1, budget)]),
        background_tokens=rng.choice([0, 0, 1, rng.randint(1, budget)]),
        aging_steps=rng.choice([None, None, 1, 2, 3, 7]),
        prefix_caching=rng.random() < 0.8,
        max_scored=rng.choice([256, rng.randint(1, 12)]),
        recompute_beyond=rng.choice([None, None, rng.randint(1, 16)]),
        drafting=rng.choice([None, rng.randrange(1 << 30)]),
        storing=rng.choice([None, rng.randrange(1 << 30)]),
        retention=rng.choice([None, rng.randint(1, 40)]),
    )


def submit_some(rng: random.Random, world: World) -> None:
    """Submit one request, or several with a common prefix: one of a few fixed prefixes, or a sequence that has
    ended."""
    beginning = rng.choice([[0] * 16, [0, 1] * 8, [0, 0, 1, 2] * 4, *world.turns])
    num_common = rng.choice([rng.randint(0, 16), len(beginning)])
    for _ in range(rng.choice([1, 1, 1, 4])):
        world.submit(
            [*beginning[:num_common], *(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4)))],
            rng.choice([1, 2, 5, 20]),
            num_sequences=rng.choice([1, 1, 1, 2, 3, 5]),
            stop_token_ids=frozenset(rng.sample(range(2 * VOCABULARY), 1)),
            min_output=rng.randint(0, 3),
            priority=rng.choice([-1, 0, 1, 2, BACKGROUND]),
            cache_salt=rng.choice([None, None, None, "tenant"]),
            scores_prompt=rng.random() < 0.2,
        )


def random_samples(rng: random.Random) -> list[list[int]]:
    """One token for each span, rarely several."""
    most = 3 if rng.random() < 0.2 else 1
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, most))] for _ in range(rng.randint(1, 4))]


def random_operation(rng: random.Random, world: World) -> None:
    """Run one random operation, most often a step."""
    what = rng.random()
    if what < 0.2 and len(world.unfinished) < 20:
        submit_some(rng, world)
    elif what < 0.32:
        world.plan()
    elif what < 0.92:
        world.commit(random_samples(rng))
    elif what < 0.935:
        world.fail()
    elif what < 0.955:
        world.discard()
    elif what < 0.975:
        world.abort(rng.randrange(1000))
    else:
        world.finish(rng.randrange(1000), rng.choice([None, 0, 1, 3]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--operations", type=int, default=1_000_000)
    arguments = parser.parse_args()
    start = time.perf_counter()
    reached: Counter[str] = Counter()
    num_worlds = num_operations = 0
    while num_operations < arguments.operations:
        seed = f"{arguments.seed}/{num_worlds}"
        try:
            reached += soak_one_world(seed)
        except BaseException:
            print(f"world {seed} went wrong")
            raise
        num_worlds += 1
        num_operations += OPERATIONS_PER_WORLD
        if num_worlds % 100 == 0:
            print(f"{num_operations:,} operations, {time.perf_counter() - start:.0f} s", flush=True)
    print(f"Python {platform.python_version()}, seed {arguments.seed}: nothing found")
    print(f"{num_operations:,} operations in {num_worlds:,} worlds, {time.perf_counter() - start:.0f} s")
    for name, count in sorted(reached.items()):
        print(f"{count:12,}  {name}")


def soak_one_world(seed: str) -> Counter[str]:
    """Open a world, run operations in it, and drain it."""
    rng = random.Random(seed)
    world = World(random_sizes(rng))
    for _ in range(OPERATIONS_PER_WORLD):
        random_operation(rng, world)
        check(world)
    world.drain()
    return world.reached


if __name__ == "__main__":
    main()
