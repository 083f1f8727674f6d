"""`PrefixCache`: which block holds which tokens, so that a prefix that was computed once is found again.

A node stands for one full block of tokens behind a given prefix. Its key is exact: (the parent node's number, the
block's tokens), where the first block's parent is a `Root`. Exact keys, not hashes: a collision can't hand one user's
keys and values to another. The parent is a number that is never used again, not a block's index: an index comes back
with other content after an eviction, and then nothing below the old content may be found.

Decides nothing about memory: `BlockPool` says when a block is taken for something else. (Prefix reuse by full blocks is
vLLM's, Kwon et al., SOSP 2023, who chain hashes; SGLang, Zheng et al., 2024, keeps a radix tree.)
"""

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Root(NamedTuple):
    """What must be equal besides the tokens for keys and values to be the same.

    Attributes:
        cache_salt: of the request: requests with different salts never share.
        adapter_id: whose weights were added.
        is_long: computed as part of a sequence past the scheduler's `recompute_beyond`.
    """

    cache_salt: str | None = None
    adapter_id: int = 0
    is_long: bool = False


Parent: TypeAlias = Root | int
"""What a block of tokens stands behind: nothing yet, or the node of the block before."""

Key: TypeAlias = tuple[Parent, bytes]


@dataclass(frozen=True, slots=True)
class Node:
    """A full block of tokens behind a prefix, and the block of the cache that holds its keys and values."""

    number: int
    key: Key
    block: int


def make_key(parent: Parent, token_ids: SequenceOf[int]) -> Key:
    """What a block of these tokens behind `parent` is found by."""
    return parent, array("i", token_ids).tobytes()


class PrefixCache:
    """The nodes of all blocks whose content is known."""

    def __init__(self) -> None:
        self._nodes: dict[Key, Node] = {}
        self._node_of_block: dict[int, Node] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        """Whether this block's content is known."""
        return block in self._node_of_block

    def find(self, key: Key) -> Node | None:
        """The node of this key, if its block still holds it."""
        return self._nodes.get(key)

    def node_of(self, block: int) -> Node | None:
        """What a block holds, if it is known."""
        return self._node_of_block.get(block)

    def add(self, key: Key, block: int) -> Node:
        """Remember what a block holds; the key must be new and the block unknown."""
        node = Node(self._next_number, key, block)
        self._next_number += 1
        self._nodes[key] = self._node_of_block[block] = node
        return node

    def forget(self, block: int) -> None:
        """The block's content is not to be found any more; what was behind it can't be reached then."""
        del self._nodes[self._node_of_block.pop(block).key]
