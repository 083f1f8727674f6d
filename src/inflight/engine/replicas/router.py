"""`Router`: chooses the replica for a request. Pure: shared by the server and the simulator.

It records all sent requests, and the times of their first tokens and ends. From these it derives each replica's load
(tokens owed, sequences running) and probable prefix cache: the full blocks of its requests, up to the cache's size,
evicted least recently used first.

"prefix" minimises the expected time to first token. This weighs cached prefixes against load in seconds, so a session
stays where its history is until recomputing it elsewhere is faster. It compares the replica with the longest prefix and
two drawn at random ("the power of two choices", Mitzenmacher, 2001), which is nearly as good as comparing all.
"least-loaded" counts requests only; "round-robin" takes turns.
"""

import random
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from inflight.engine.replicas.ttft_estimator import ReplicaLoad, TtftEstimator

NUM_DRAWN = 2


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
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def load_before(self, in_background: bool) -> ReplicaLoad:
        """The load that a request waits for."""
        if not in_background:
            return self.load
        num_owed = self.load.num_owed + self.background.num_owed
        return ReplicaLoad(num_owed, self.load.num_running + self.background.num_running)

    def load_of(self, sent: RoutedRequest) -> ReplicaLoad:
        """The load that a request is part of."""
        return self.background if sent.in_background else self.load

    def num_cached(self, blocks: SequenceOf[int]) -> int:
        """The estimated number of a prompt's first blocks in its cache."""
        return next((place for place, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def keep(self, blocks: SequenceOf[int]) -> None:
        """Add blocks. As in the cache, a sequence's last blocks are evicted first."""
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
        kind: Hashable,
        available: SequenceOf[int],
        now: float,
        num_sequences: int = 1,
        *,
        in_background: bool = False,
    ) -> RoutedRequest:
        """Choose one of the available replicas for a prompt, and count the request there.

        Args:
            kind: what else must be equal for two prompts to share a prefix: salt and adapter.
        """
        is_alone = len(self._replicas) == 1
        blocks = [] if is_alone or not self._size.num_blocks else list(self._blocks_of(token_ids, kind))
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

    def end(self, sent: RoutedRequest, now: float, token_ids: SequenceOf[int] = (), kind: Hashable = None) -> None:
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
        if self._size.num_blocks and len(self._replicas) > 1:
            replica.keep(list(self._blocks_of(token_ids, kind)))

    def forget(self, number: int) -> None:
        """A replica was restarted: its cache is empty. (Its old requests still end.)"""
        old, new = self._replicas[number], _Replica(self._size.num_blocks)
        new.load, new.background = old.load, old.background
        self._replicas[number] = new

    def _chosen(self, num_tokens: int, blocks: SequenceOf[int], available: SequenceOf[int], in_background: bool) -> int:
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

    def _num_owed(self, replica: _Replica, num_tokens: int, blocks: SequenceOf[int]) -> int:
        return max(1, num_tokens - replica.num_cached(blocks) * self._size.block_size)

    def _blocks_of(self, token_ids: SequenceOf[int], kind: Hashable) -> Iterator[int]:
        """A chained hash for each full block. (A collision would only route a request badly.)"""
        block_size, number = self._size.block_size, hash(kind)
        for end in range(block_size, len(token_ids) + 1, block_size):
            number = hash((number, *token_ids[end - block_size : end]))
            yield number
