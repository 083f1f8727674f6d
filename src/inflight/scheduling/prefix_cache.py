"""`PrefixCache`: which blocks hold which tokens, so that a prefix that was computed once is found again.

A node stands for one full block of tokens behind a given prefix, and names the block of each cache group that holds
their keys and values, if one still does. Its key is exact: (the parent node, the block's tokens), where the first
block's parent is a `Root`. Exact keys, not hashes: a collision can't hand one user's keys and values to another. The
parent is the node itself, not its block: a block comes back with other content after an eviction, and then nothing
below the old content may be found.

Groups that keep only a window let go of the first blocks of a prefix, so a node is known for as long as anything behind
it is. Decides nothing about memory: `BlockPool` says when a block is taken for something else. (Prefix reuse by full
blocks is vLLM's, Kwon et al., SOSP 2023, who chain hashes; SGLang, Zheng et al., 2024, keeps a radix tree.)
"""

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from inflight.contracts.plan import NO_BLOCK


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


Parent: TypeAlias = "Root | Node"
"""What a block of tokens stands behind: nothing yet, or the block before."""

Key: TypeAlias = tuple[Parent, bytes]


@dataclass(slots=True, eq=False)
class Node:
    """A full block of tokens behind a prefix.

    Attributes:
        blocks: for each cache group the block that holds their keys and values, or `NO_BLOCK`.
        num_children: nodes whose parent this is.
    """

    key: Key = field(repr=False)  # which holds all those before
    blocks: list[int]
    num_children: int = 0


def make_key(parent: Parent, token_ids: SequenceOf[int]) -> Key:
    """What a block of these tokens behind `parent` is found by."""
    return parent, array("i", token_ids).tobytes()


class PrefixCache:
    """The nodes of all blocks whose content is known, in so many cache groups."""

    def __init__(self, num_groups: int = 1) -> None:
        self._num_groups = num_groups
        self._nodes: dict[Key, Node] = {}
        self._place_of_block: dict[int, tuple[Node, int]] = {}  # its node, and of which group it is

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        """Whether this block's content is known."""
        return block in self._place_of_block

    def find(self, key: Key) -> Node | None:
        """The node of this key, if anything is known of it or of what is behind it."""
        return self._nodes.get(key)

    def node_of(self, block: int) -> Node | None:
        """What a block holds, if it is known."""
        node, _ = self._place_of_block.get(block, (None, 0))
        return node

    def add(self, key: Key) -> Node:
        """A node for a new key; blocks are to be `put` to it."""
        node = self._nodes[key] = Node(key, [NO_BLOCK] * self._num_groups)
        parent = key[0]
        if isinstance(parent, Node):
            parent.num_children += 1
        return node

    def put(self, node: Node, group: int, block: int) -> None:
        """Remember that a block, of which nothing is known, holds a node's content in a group that had none."""
        node.blocks[group] = block
        self._place_of_block[block] = node, group

    def forget(self, block: int) -> None:
        """The block's content is not to be found any more."""
        node, group = self._place_of_block.pop(block)
        node.blocks[group] = NO_BLOCK
        parent: Parent = node
        while isinstance(parent, Node) and self._is_useless(parent):
            del self._nodes[parent.key]
            parent = parent.key[0]
            if isinstance(parent, Node):
                parent.num_children -= 1

    def _is_useless(self, node: Node) -> bool:
        """Whether nothing is known of a node or of what is behind it; false of one that is gone already, and whose last
        child was found by somebody who had it."""
        is_empty = node.num_children == 0 and all(block == NO_BLOCK for block in node.blocks)
        return is_empty and self._nodes.get(node.key) is node
