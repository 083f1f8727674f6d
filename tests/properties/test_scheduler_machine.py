"""The scheduler in a world where Hypothesis chooses operations in any order (`world.py`), and a check that such worlds
really reach every mechanism."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from inflight.contracts.api.config import BACKGROUND
from tests.properties.expected import Sizes
from tests.properties.invariants import check
from tests.properties.soak import soak_one_world
from tests.properties.world import World

VOCABULARY = 3

tokens = st.integers(0, VOCABULARY - 1)
"""Few tokens, so that equal sequences are frequent."""

samples = st.lists(st.lists(tokens, min_size=1, max_size=3), min_size=1, max_size=4)
"""The tokens that a step gives to its spans in turn, repeated if there are more spans; several tokens as with
speculation."""

beginnings = st.sampled_from([[0] * 16, [0, 1] * 8, [0, 0, 1, 2] * 4])
"""The common prefixes of prompts."""


def make_sizes(
    windows: tuple[int | None, ...], blocks_per_group: int, sharing: bool, num_states: int, **others: Any
) -> Sizes:
    sharing = sharing or windows != (None,)
    num_blocks = blocks_per_group * len(windows)
    return Sizes(
        windows=windows, num_blocks=num_blocks, sharing=sharing, num_states=num_states if sharing else 0, **others
    )


sizes = st.builds(
    make_sizes,
    windows=st.sampled_from([(None,), (None,), (None, 4), (None, 2, 2), (1,), (3,), (6, 11)]),
    blocks_per_group=st.integers(1, 16),
    block_size=st.integers(1, 5),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 24),
    max_prefill=st.none() | st.integers(1, 8),
    background_tokens=st.sampled_from([0, 0, 1, 5]),
    aging_steps=st.sampled_from([None, 1, 2, 5]),
    prefix_caching=st.sampled_from([True, True, True, False]),
    max_scored=st.sampled_from([256, 1, 3, 7]),
    recompute_beyond=st.none() | st.integers(1, 16),
    drafting=st.none() | st.integers(0, 1 << 30),
    storing=st.none() | st.integers(0, 1 << 30),
    retention=st.none() | st.integers(1, 40),
    sharing=st.sampled_from([True, True, False]),
    num_states=st.just(0) | st.integers(2, 24),
)

shapes = {
    "num_common": st.integers(0, 16),
    "tail": st.lists(tokens, min_size=1, max_size=3),
    "max_output": st.integers(1, 20),
    "num_sequences": st.integers(1, 4),
    "stop_token_ids": st.frozensets(st.integers(0, 2 * VOCABULARY), max_size=2),
    "min_output": st.integers(0, 4),
    "priority": st.integers(-1, 2) | st.just(BACKGROUND),
    "cache_salt": st.sampled_from([None, None, "tenant"]),
    "scores_prompt": st.sampled_from([False, False, True]),
}
"""The variants of a request, apart from its prefix."""


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, steps are planned and land in every possible way, and sequences are ended at any time."""

    @initialize(sizes=sizes)
    def open(self, sizes: Sizes) -> None:
        self.world = World(sizes)

    @rule(beginning=beginnings, **shapes)
    def submit(self, beginning: list[int], num_common: int, tail: list[int], **shape: object) -> None:
        self.world.submit([*beginning[:num_common], *tail], **shape)  # type: ignore[arg-type]

    @rule(turn=st.integers(-3, -1), **shapes)
    def submit_the_next_turn(self, turn: int, num_common: int, tail: list[int], **shape: object) -> None:
        """Submit a prompt that continues an ended sequence."""
        turn = self.world.turns[max(turn, -len(self.world.turns))]
        self.world.submit([*turn, *tail], **shape)  # type: ignore[arg-type]

    @rule(beginning=beginnings, num_requests=st.integers(2, 5), **shapes)
    def submit_many(
        self, beginning: list[int], num_requests: int, num_common: int, tail: list[int], **shape: object
    ) -> None:
        """Submit several requests with a common prefix together."""
        for number in range(num_requests):
            self.world.submit([*beginning[:num_common], *tail, number % VOCABULARY], **shape)  # type: ignore[arg-type]

    @rule()
    def plan(self) -> None:
        self.world.plan()

    @rule(sampled=samples)
    def commit(self, sampled: list[list[int]]) -> None:
        self.world.commit(sampled)

    @rule(num_steps=st.integers(1, 12), sampled=samples)
    def run_steps(self, num_steps: int, sampled: list[list[int]]) -> None:
        """Run several consecutive steps, so that long prompts and preempted sequences make progress."""
        for _ in range(num_steps):
            self.world.commit(sampled)
            check(self.world)

    @rule()
    def fail(self) -> None:
        self.world.fail()

    @rule()
    def discard(self) -> None:
        self.world.discard()

    @rule(pick=st.integers(0, 30))
    def abort(self, pick: int) -> None:
        self.world.abort(pick)

    @rule(pick=st.integers(0, 30), num_kept=st.none() | st.integers(0, 6))
    def finish(self, pick: int, num_kept: int | None) -> None:
        self.world.finish(pick, num_kept)

    @invariant()
    def everything_agrees(self) -> None:
        if hasattr(self, "world"):
            check(self.world)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()
            for name, count in self.world.reached.items():
                if count:
                    event(name)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.fixture(scope="module")
def reached() -> Counter[str]:
    """What happened in a few reproducible worlds of the soak."""
    total: Counter[str] = Counter()
    for number in range(100):
        total += soak_one_world(f"reached/{number}")
    return total


@pytest.mark.parametrize(
    ("mechanism", "at_least"),
    [
        ("LongRoPE restarts", 50),
        ("blocks let go", 1000),
        ("blocks loaded", 300),
        ("copies", 200),
        ("duplicates given up", 200),
        ("ended with abort", 100),
        ("ended with error", 100),
        ("ended with length", 1000),
        ("ended with stop", 500),
        ("evictions", 1000),
        ("forks from a sibling that ends", 100),
        ("preemptions for a better one", 50),
        ("preemptions for blocks", 300),
        ("prompts scored in pieces", 300),
        ("prompts that waited for rows of logits", 100),
        ("restarts after a step that went wrong", 30),
        ("accepted draft tokens", 1000),
        ("rejected draft tokens", 1000),
        ("sequences that found something computed", 1000),
        ("spans that read what another wrote in the same step", 30),
        ("states left on the way", 300),
        ("steps waited for a sibling", 300),
        ("steps waited for a state", 5),
    ],
)
def test_every_mechanism_is_reached_many_times(reached: Counter[str], mechanism: str, at_least: int) -> None:
    assert reached[mechanism] >= at_least
