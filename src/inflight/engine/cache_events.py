"""`CacheEvents`: blocks added to and removed from one engine's prefix cache.

A block is named by 64 bits of its block hash, the same in every process. Of a model with sliding windows only the
blocks of a cache group that keeps all tokens are told of, if there is one: while these are there, most of a prefix is.
"""

from array import array
from dataclasses import dataclass

from inflight.contracts.step.block_hash import Root
from inflight.contracts.step.cache_layout import ALL_TOKENS
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.prefix_cache import Parent, PrefixNode, hash_of


@dataclass(slots=True)
class Stored:
    """Consecutive blocks that can now be found.

    Attributes:
        hashes: their numbers.
        parent: the number of the block before them; None: they begin a prompt.
        token_ids: all their tokens.
        cache_salt, adapter: under which they are found; see `Root`.
    """

    hashes: list[int]
    parent: int | None
    token_ids: list[int]
    cache_salt: str | None
    adapter: str | None = None


@dataclass(slots=True)
class Removed:
    """Blocks that can no longer be found."""

    hashes: list[int]


class CacheEvents:
    """Watches a pool's prefix cache, and queues its events."""

    def __init__(self, pool: BlockPool) -> None:
        groups = pool.layout.groups
        self._group = groups.index(ALL_TOKENS) if ALL_TOKENS in groups else 0
        self._events: list[Stored | Removed] = []
        self._block_size = pool.block_size
        pool.watch(self)

    def take(self) -> list[Stored | Removed]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def stored(self, node: PrefixNode, group: int) -> None:
        """A node has a block in a group."""
        if group != self._group:
            return
        before, token_bytes = node.key
        parent = _number(before) if isinstance(before, PrefixNode) else None
        number = _number(node)
        token_ids = array("i", token_bytes).tolist()[: self._block_size]  # digests of images follow
        last = self._events[-1] if self._events else None
        if isinstance(last, Stored) and parent is not None and last.hashes[-1] == parent:
            last.hashes.append(number)
            last.token_ids += token_ids
        else:
            root = _root(node)
            self._events.append(Stored([number], parent, token_ids, root.cache_salt, root.adapter))

    def removed(self, node: PrefixNode, group: int) -> None:
        """A node has no block in a group any more."""
        if group != self._group:
            return
        number = _number(node)
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed):
            last.hashes.append(number)
        else:
            self._events.append(Removed([number]))


def _number(node: PrefixNode) -> int:
    return int.from_bytes(hash_of(node)[:8], "little")


def _root(parent: Parent) -> Root:
    while isinstance(parent, PrefixNode):
        parent = parent.key[0]
    return parent
