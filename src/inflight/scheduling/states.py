"""`States`: the recurrent states of sequences, and checkpoints of them.

A running sequence has one state, of all its computed tokens. A step continues from it, and leaves states on the way: at
the end; after each draft token, so that a rejected one costs nothing; and *checkpoints*, at the end of a block. The
prefix cache's node of that block then names the checkpoint, and later sequences continue from the last one in their
prefix. Nothing is copied between steps: a step reads one state and writes others.

A state takes as much memory as the keys and values of hundreds of tokens, so checkpoints are few. They are made

- where prefixes part: a sequence that finds more cached blocks than states leaves one at the end of these blocks
  (Marconi, Pan et al., MLSys 2025);
- at the end of a prompt, and at distances before it that double. So whatever part of the prompt a later one shares, the
  tokens that are computed again are no more than those of the prompt that it does not share, or a few blocks;
- at the last end of a block, until there is a later one: a session's next turn continues from there, and the sequence
  itself after a preemption.

The least recently used checkpoint is evicted, after those that a later one has replaced, and before those whose blocks
are kept for a session.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from inflight.contracts.step.plan import NO_BLOCK, NO_STATE
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.prefix_cache import PrefixNode
from inflight.scheduling.sequence import Sequence

STATES_PER_SLOT = 2
"""States that a sequence needs at most: a checkpoint that it reads, and its own."""

LEAST_DISTANCE = 2
"""Blocks between the last two checkpoints of a prompt."""


class StateUse(NamedTuple):
    """The states that a step reads and writes for one sequence.

    Attributes:
        before: the state that it continues from.
        after: (position, state), ascending: the states that it leaves.
    """

    before: int
    after: SequenceOf[tuple[int, int]]


NO_STATES = StateUse(NO_STATE, ())


def prompt_checkpoints(num_tokens: int, block_size: int) -> set[int]:
    """Return the positions of checkpoints of a prompt. The last token is always computed, and is in none."""
    last, distance, found = (num_tokens - 1) // block_size, 0, set()
    while distance < last:
        found.add((last - distance) * block_size)
        distance = max(LEAST_DISTANCE, 2 * distance)
    return found


class States:
    """All `num_states` states of the cache.

    Args:
        num_states: at least `STATES_PER_SLOT` for each slot.
        num_slots: the most sequences that run at once.
        block_pool: has the prefix cache.
        makes_checkpoints: whether any sequence can find them.
    """

    def __init__(self, num_states: int, num_slots: int, block_pool: BlockPool, *, makes_checkpoints: bool) -> None:
        self.num_states = num_states
        self.save: Callable[[int], None] | None = None
        """Called with each checkpoint that stays, once it is computed; None: no listener."""
        self._most_loading = num_states - STATES_PER_SLOT * num_slots
        self._num_loading = 0
        self._pool = block_pool
        self._makes_checkpoints = makes_checkpoints
        self._num_references = [0] * num_states
        self._num_times_taken = [0] * num_states
        self._free: list[int] = []
        self._num_touched = 0
        self._node_of: dict[int, PrefixNode] = {}  # of each checkpoint
        self._newest_of: dict[int, Sequence] = {}  # checkpoints that their sequence's next one replaces
        self._replaced: OrderedDict[int, None] = OrderedDict()  # unreferenced checkpoints, as the next
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._in_flight: dict[Sequence, StateUse] = {}
        self._wanted: set[PrefixNode] = set()

    @property
    def num_available(self) -> int:
        """Unreferenced states: free, or checkpoints."""
        return len(self._free) + len(self._replaced) + len(self._cached) + self.num_states - self._num_touched

    # ------------------------------------------------------------------------------------- before a step

    def choose_checkpoints(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Choose the positions of a sequence's checkpoints.

        Args:
            num_cached_tokens: how many of its tokens have cached blocks, where another sequence's go on differently.
        """
        block_size = self._pool.block_size
        sequence.checkpoints = frozenset(
            {*prompt_checkpoints(sequence.num_prompt_tokens, block_size), num_cached_tokens}
        )

    def want(self, node: PrefixNode) -> None:
        """Let the step being planned leave a checkpoint at a node that it computes."""
        self._wanted.add(node)

    def continue_from(self, sequence: Sequence, node: PrefixNode) -> None:
        """Let a sequence continue from a node's checkpoint."""
        self._stays(node.state)
        self._hold(node.state)
        self._drop(sequence.state)
        sequence.state = node.state

    def num_spare(self, sequences: Mapping[Sequence, int]) -> int:
        """How many states are left for draft tokens, after one for each of a step's sequences."""
        return self.num_available - sum(not self._is_own(sequence.state) for sequence in sequences)

    def plan(
        self, lengths: Mapping[Sequence, int], drafts: Mapping[Sequence, SequenceOf[int]]
    ) -> dict[Sequence, StateUse]:
        """Choose the states that a step reads and writes. They are in use until `settle` or `release`.

        Args:
            lengths: the tokens that each sequence computes without draft tokens.
            drafts: draft tokens after these, for some.
        """
        num_needed = sum(not self._is_own(sequence.state) for sequence in lengths) + sum(map(len, drafts.values()))
        for sequence, length in lengths.items():
            if sequence.request.runs_whole:
                self._in_flight[sequence] = StateUse(NO_STATE, [(length, NO_STATE)])
                continue
            end = sequence.num_computed_tokens + length
            on_the_way = sorted(self._checkpoints(sequence, end))[: max(0, self.num_available - num_needed)]
            own = sequence.state if self._is_own(sequence.state) else self._take()
            ends = [end + number for number in range(1, len(drafts.get(sequence, ())) + 1)]
            num_needed -= (own != sequence.state) + len(ends)
            after = [(position, self._take()) for position in on_the_way]
            after += [(end, own), *((position, self._take()) for position in ends)]
            self._in_flight[sequence] = StateUse(sequence.state, after)
        self._wanted.clear()
        return self._in_flight

    def _checkpoints(self, sequence: Sequence, end: int) -> set[int]:
        """The positions at which a span leaves checkpoints on the way to its end."""
        start, block_size = sequence.num_computed_tokens, self._pool.block_size
        if not self._makes_checkpoints:
            return set()
        node, position = sequence.parent, sequence.num_known_blocks * block_size
        while self._wanted and position > start and isinstance(node, PrefixNode):
            if node in self._wanted:
                sequence.checkpoints |= {position}
            node, position = node.key[0], position - block_size
        found = {end // block_size * block_size, *sequence.checkpoints}
        return {position for position in found if start < position < end}

    # ------------------------------------------------------------------------------------- after a step

    def settle(self, sequence: Sequence) -> None:
        """A step is over: a sequence has the state of its computed tokens, which are known by now. Checkpoints are in
        the prefix cache, others are free."""
        use = self._in_flight.pop(sequence, NO_STATES)
        if all(state != use.before for _, state in use.after):
            self._drop(use.before)
        for position, state in use.after:
            if state == NO_STATE:
                continue
            if position <= sequence.num_computed_tokens and position % self._pool.block_size == 0:
                self._remember(sequence, position, state)
            if position == sequence.num_computed_tokens:
                sequence.state = state
            else:
                self._drop(state)

    @property
    def in_flight(self) -> list[Sequence]:
        """The sequences of the step in flight. If it fails, their states may be spoiled, and `release` follows for
        each."""
        return list(self._in_flight)

    def release(self, sequence: Sequence) -> None:
        """A sequence runs no longer, or starts over."""
        use = self._in_flight.pop(sequence, NO_STATES)
        for _, state in use.after:
            if state != sequence.state:
                self._drop(state)
        self._drop(sequence.state)
        sequence.state = NO_STATE
        if self._newest_of.get(sequence.newest_checkpoint) is sequence:
            self._stays(sequence.newest_checkpoint)

    def _remember(self, sequence: Sequence, position: int, state: int) -> None:
        """Make a state in use the checkpoint of the end of a sequence's block, unless there is one."""
        node, number = sequence.parent, sequence.num_known_blocks - position // self._pool.block_size
        for _ in range(number):
            assert isinstance(node, PrefixNode)
            node = node.key[0]
        if number < 0 or not isinstance(node, PrefixNode) or not self.remember(node, state):
            return
        before, sequence.newest_checkpoint = sequence.newest_checkpoint, state
        if self._newest_of.get(before) is sequence:
            del self._newest_of[before]
            if before in self._cached:
                del self._cached[before]
                self._replaced[before] = None
        self._newest_of[state] = sequence
        if position in sequence.checkpoints:
            self._stays(state)

    def _stays(self, checkpoint: int) -> None:
        """A checkpoint of a sequence is not replaced by its next one."""
        if self._newest_of.pop(checkpoint, None) is not None and self.save is not None:
            self.save(checkpoint)

    # ------------------------------------------------------------------------------------- from elsewhere

    def take_to_load(self) -> int:
        """Take a state to load a checkpoint into, until it is `loaded`; `NO_STATE`: there is none."""
        if self._num_loading >= self._most_loading or not self.num_available:
            return NO_STATE
        self._num_loading += 1
        return self._take()

    def loaded(self, state: int) -> None:
        """A load is over."""
        self._num_loading -= 1
        self._drop(state)

    def remember(self, node: PrefixNode, state: int) -> bool:
        """Make a state in use a node's checkpoint, unless it has one."""
        if node.state != NO_STATE or state in self._node_of:
            return False
        node.state, self._node_of[state] = state, node
        return True

    def node_of(self, checkpoint: int) -> PrefixNode:
        """The node of a checkpoint."""
        return self._node_of[checkpoint]

    def num_times_taken(self, state: int) -> int:
        """The number of reallocations of this state: while it stays the same, so does a checkpoint. Thread-safe."""
        return self._num_times_taken[state]

    # ------------------------------------------------------------------------------------- one state

    def _is_own(self, state: int) -> bool:
        """Whether a sequence may write to its state."""
        return state != NO_STATE and state not in self._node_of

    def _take(self) -> int:
        if self._free:
            state = self._free.pop()
        elif self._replaced:
            state, _ = self._replaced.popitem(last=False)
        elif self._num_touched < self.num_states:
            state = self._num_touched
            self._num_touched += 1
        elif self._cached:
            state = next((each for each in self._cached if not self._is_kept(each)), next(iter(self._cached)))
            del self._cached[state]
        else:
            raise RuntimeError("there are too few recurrent states")
        if (node := self._node_of.pop(state, None)) is not None:
            node.state = NO_STATE
            self._newest_of.pop(state, None)
        self._num_references[state] = 1
        self._num_times_taken[state] += 1
        return state

    def _is_kept(self, state: int) -> bool:
        blocks = self._node_of[state].blocks
        return any(self._pool.is_kept(block) for block in blocks if block != NO_BLOCK)

    def _hold(self, state: int) -> None:
        self._cached.pop(state, None)
        self._replaced.pop(state, None)
        self._num_references[state] += 1

    def _drop(self, state: int) -> None:
        if state == NO_STATE:
            return
        self._num_references[state] -= 1
        if self._num_references[state] == 0:
            if state in self._node_of:
                self._cached[state] = None
            else:
                self._free.append(state)
