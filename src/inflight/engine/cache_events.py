"""`CacheEvents`: blocks added to and removed from one engine's prefix cache.

A block is named by a number of 64 bits: a checksum (XXH3) of its tokens and of the number before it, where the first
follows one of salt and adapter. It is the same in every process. For a model with sliding windows, only a cache group
that keeps all tokens is reported, if there is one: while its blocks exist, most of a prefix does.
"""

from array import array
from dataclasses import dataclass

import xxhash

from inflight.contracts.cache_layout import ALL_TOKENS
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.prefix_cache import Parent, PrefixNode, Root


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
        self._hashes: dict[PrefixNode, int] = {}  # of reported blocks
        self._events: list[Stored | Removed] = []
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
        parent = self._hash(before) if isinstance(before, PrefixNode) else None
        number = self._hashes[node] = self._hash(node)
        token_ids = array("i", token_bytes).tolist()
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
        number = self._hashes.pop(node)
        last = self._events[-1] if self._events else None
        if isinstance(last, Removed):
            last.hashes.append(number)
        else:
            self._events.append(Removed([number]))

    def _hash(self, parent: Parent) -> int:
        unknown: list[PrefixNode] = []
        while isinstance(parent, PrefixNode) and parent not in self._hashes:
            unknown.append(parent)
            parent = parent.key[0]
        if isinstance(parent, PrefixNode):
            number = self._hashes[parent]
        else:
            number = xxhash.xxh3_64_intdigest(repr(tuple(parent)).encode())
        for node in reversed(unknown):
            number = xxhash.xxh3_64_intdigest(number.to_bytes(8, "little") + node.key[1])
        return number


def _root(parent: Parent) -> Root:
    while isinstance(parent, PrefixNode):
        parent = parent.key[0]
    return parent
