"""`Router`: chooses the replica for a request. Pure: shared by the server and the simulator.

It records all sent requests, and the times of their first tokens and ends. From these it derives each replica's load
(tokens owed, sequences running) and probable prefix cache: the full blocks of its requests, up to the cache's size,
evicted least recently used first.

"prefix" minimises the expected time to first token. This weighs cached prefixes against load in seconds, so a session
stays where its history is until recomputing it elsewhere is faster. It compares the replica with the longest prefix and
two drawn at random ("the power of two choices", Mitzenmacher, 2001), which is nearly as good as comparing all.
"least-loaded" counts requests only; "round-robin" takes turns.

`TtftEstimator`: estimates the time to first token, learned from finished prefills. Pure.
"""

import random
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from inflight.contracts.step.block_hash import Root, block_hashes

FORGETTING = 0.98
"""The decay of earlier observations at each new one."""
LARGEST_SURPRISE = 3.0
"""An observation counts as at most this multiple of the expected time: a stalled replica says nothing about load."""
MIN_SECONDS = 1e-6
"""Errors are relative to the time, but to no less than this."""
FIRST_ESTIMATE = np.array([0.01, 2e-4, 2e-3])
"""Initial seconds per request, per token owed and per running sequence; scaled to the machine's pace."""
TRUST = 0.05
"""How many requests the first estimate counts as."""


@dataclass(slots=True)
class ReplicaLoad:
    """A replica's load when a request arrives.

    Attributes:
        num_owed: uncomputed prompt tokens.
        num_running: unfinished sequences.
    """

    num_owed: int = 0
    num_running: int = 0


class TtftEstimator:
    """Time to first token as a linear function of a replica's load: non-negative least squares on relative errors, with
    exponential decay. Beyond the slots, a request also waits for others to end.

    Args:
        num_slots: how many sequences run at once.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._seconds_of_run = 0.0
        self._line = FIRST_ESTIMATE
        self._pace = 1.0
        self._squares = np.zeros((3, 3))  # normal equations
        self._targets = np.zeros(3)

    def seconds(self, load: ReplicaLoad) -> float:
        """The expected time for a request whose own tokens are among those owed."""
        offset, per_token, per_sequence = self._line.tolist()
        beyond = max(0, load.num_running + 1 - self._num_slots)
        waiting = beyond * self._seconds_of_run / self._num_slots
        return float(offset + per_token * load.num_owed + per_sequence * load.num_running + waiting)

    def observe_first_token(self, load: ReplicaLoad, seconds: float) -> None:
        """Learn from a request that got its first token `seconds` after meeting this load."""
        if load.num_running >= self._num_slots:
            return
        is_first, seconds = not self._targets.any(), max(MIN_SECONDS, seconds)
        if not is_first:
            seconds = min(seconds, LARGEST_SURPRISE * max(MIN_SECONDS, self.seconds(load)))
        sizes = np.array([1.0, load.num_owed, load.num_running])
        pace = seconds / float(FIRST_ESTIMATE @ sizes)
        self._pace = pace if is_first else FORGETTING * self._pace + (1 - FORGETTING) * pace
        self._squares = FORGETTING * self._squares + np.outer(sizes, sizes) / seconds**2
        self._targets = FORGETTING * self._targets + sizes / seconds
        self._line = self._solved()

    def observe_run(self, seconds: float) -> None:
        """Learn from a request that ended `seconds` after its first token."""
        self._seconds_of_run += (1 - FORGETTING if self._seconds_of_run else 1.0) * (seconds - self._seconds_of_run)

    def _solved(self) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        """The best fit without negative coefficients: `[3]` float64, of an offset, owed tokens and running sequences,
        in seconds."""
        line, kept, estimate = np.zeros(3), [0, 1, 2], self._pace * FIRST_ESTIMATE
        squares, targets = self._squares + np.diag(TRUST / estimate**2), self._targets + TRUST / estimate
        while kept:
            values = np.linalg.solve(squares[np.ix_(kept, kept)], targets[kept])
            if values.min() >= 0:
                line[kept] = values
                break
            del kept[int(values.argmin())]
        return line


NUM_DRAWN = 2
NO_ROOT = Root()


@dataclass(frozen=True, slots=True)
class ReplicaSize:
    """The size of a replica.

    Attributes:
        num_slots: how many sequences run at once.
        num_blocks: blocks of prefixes that its cache can hold; 0: it shares none.
        block_size: the tokens of each.
    """

    num_slots: int
    num_blocks: int
    block_size: int


@dataclass(slots=True)
class RoutedRequest:
    """A request at its replica.

    Attributes:
        replica: its number.
        num_owed: prompt tokens that the replica probably must compute.
        load: the replica's load at arrival, including the request.
        time: when it was sent; after its first token, when that arrived.
    """

    replica: int
    num_owed: int
    load: ReplicaLoad
    time: float
    num_sequences: int = 1
    in_background: bool = False
    has_begun: bool = False


class _Replica:
    """State of one replica.

    Attributes:
        load: of requests that do not run in the background.
        background: of background requests, which delay no others.
    """

    def __init__(self, num_blocks: int) -> None:
        self.load = ReplicaLoad()
        self.background = ReplicaLoad()
        self._num_blocks = num_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def load_before(self, in_background: bool) -> ReplicaLoad:
        """The load that a request waits for."""
        if not in_background:
            return self.load
        num_owed = self.load.num_owed + self.background.num_owed
        return ReplicaLoad(num_owed, self.load.num_running + self.background.num_running)

    def load_of(self, sent: RoutedRequest) -> ReplicaLoad:
        """The load that a request is part of."""
        return self.background if sent.in_background else self.load

    def num_cached(self, blocks: SequenceOf[bytes]) -> int:
        """How many of a prompt's first blocks it probably has."""
        return next((place for place, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def keep(self, blocks: SequenceOf[bytes]) -> None:
        """It is about to have these. Like the cache, it forgets the last blocks of a sequence first."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)


class Router:
    """Routes requests to replicas. Not thread-safe.

    Args:
        routing: one of `config.ROUTINGS`.
    """

    def __init__(self, routing: str, num_replicas: int, size: ReplicaSize, seed: int = 0) -> None:
        self._routing = routing
        self._size = size
        self._replicas = [_Replica(size.num_blocks) for _ in range(num_replicas)]
        self._expectation = TtftEstimator(size.num_slots)
        self._random = random.Random(seed)
        self._turn = 0

    def send(
        self,
        token_ids: SequenceOf[int],
        root: Root,
        available: SequenceOf[int],
        now: float,
        num_sequences: int = 1,
        *,
        in_background: bool = False,
    ) -> RoutedRequest:
        """Choose one of the available replicas for a prompt, and count the request there.

        Args:
            root: what else must be equal for two prompts to share a prefix.
        """
        is_alone = len(self._replicas) == 1
        blocks = [] if is_alone else self._blocks_of(token_ids, root)
        number = self._chosen(len(token_ids), blocks, available, in_background)
        replica = self._replicas[number]
        num_owed = self._num_owed(replica, len(token_ids), blocks)
        replica.keep(blocks)
        met = replica.load_before(in_background)
        load = ReplicaLoad(met.num_owed + num_owed, met.num_running)
        sent = RoutedRequest(number, num_owed, load, now, num_sequences, in_background)
        mine = replica.load_of(sent)
        mine.num_owed += num_owed
        mine.num_running += num_sequences
        return sent

    def begin(self, sent: RoutedRequest, now: float) -> None:
        """A request got its first token."""
        self._replicas[sent.replica].load_of(sent).num_owed -= sent.num_owed
        if not sent.in_background and len(self._replicas) > 1:  # background requests wait for others
            self._expectation.observe_first_token(sent.load, now - sent.time)
        sent.has_begun, sent.time = True, now

    def end(self, sent: RoutedRequest, now: float, token_ids: SequenceOf[int] = (), root: Root = NO_ROOT) -> None:
        """A request has ended.

        Args:
            token_ids: prompt and output, if another prompt may begin with them.
        """
        replica = self._replicas[sent.replica]
        load = replica.load_of(sent)
        load.num_running -= sent.num_sequences
        if not sent.has_begun:
            load.num_owed -= sent.num_owed
        elif not sent.in_background:
            self._expectation.observe_run(now - sent.time)
        if len(self._replicas) > 1:
            replica.keep(self._blocks_of(token_ids, root))

    def forget(self, number: int) -> None:
        """A replica was restarted: its cache is empty. (Its old requests still end.)"""
        old, new = self._replicas[number], _Replica(self._size.num_blocks)
        new.load, new.background = old.load, old.background
        self._replicas[number] = new

    def _blocks_of(self, token_ids: SequenceOf[int], root: Root) -> list[bytes]:
        return list(block_hashes(token_ids, self._size.block_size, root)) if self._size.num_blocks else []

    def _chosen(
        self, num_tokens: int, blocks: SequenceOf[bytes], available: SequenceOf[int], in_background: bool
    ) -> int:
        self._turn += 1
        if len(available) == 1:
            return available[0]
        if self._routing == "round-robin":
            return available[self._turn % len(available)]
        start = self._turn % len(available)  # of equals, each is the first in turn
        in_turn = [*available[start:], *available[:start]]
        if self._routing == "least-loaded":
            return min(in_turn, key=lambda number: self._replicas[number].load_before(in_background).num_running)
        cached = {number: self._replicas[number].num_cached(blocks) for number in in_turn}
        drawn = self._random.sample(in_turn, NUM_DRAWN)
        candidates = dict.fromkeys([max(in_turn, key=cached.__getitem__), *drawn])

        def expected(number: int) -> float:
            replica = self._replicas[number]
            met = replica.load_before(in_background)
            num_owed = met.num_owed + self._num_owed(replica, num_tokens, blocks)
            return self._expectation.seconds(ReplicaLoad(num_owed, met.num_running))

        return min(candidates, key=expected)

    def _num_owed(self, replica: _Replica, num_tokens: int, blocks: SequenceOf[bytes]) -> int:
        return max(1, num_tokens - replica.num_cached(blocks) * self._size.block_size)
