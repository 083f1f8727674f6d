"""`PrefixCache`: finds blocks by their tokens, so that a computed prefix is reused.

A node stands for one full block of tokens after a given prefix. For each cache group it has the block of their keys and
values, if one still holds them. Its key is exact: (the parent node, the block's tokens), where the first block's parent
is a `Root`. Unlike hashes, exact keys cannot collide and hand one user's keys and values to another. The parent is the
node, not its block: an evicted block gets other content, and the old content's children must not be found below it.

Cache groups that keep only a window free the first blocks of a prefix, so a node lives as long as any node below it.
`BlockPool` decides which blocks are evicted. (Prefix reuse by full blocks is vLLM's, Kwon et al., SOSP 2023, who chain
hashes; SGLang, Zheng et al., 2024, keeps a radix tree.)
"""

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from inflight.contracts.step.block_hash import Root, block_hash
from inflight.contracts.step.plan import NO_BLOCK, NO_STATE

Parent: TypeAlias = "Root | PrefixNode"
"""The parent of a block: a root, or another block."""

Key: TypeAlias = tuple[Parent, bytes]


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A full block of tokens after a prefix.

    Attributes:
        blocks: for each cache group the block that holds its keys and values, or `NO_BLOCK`.
        num_children: nodes whose parent this is.
        block_hash: see `hash_of`; empty: not known yet.
        state: the recurrent state after these tokens, if one is kept.
    """

    key: Key = field(repr=False)  # which holds all nodes before it
    blocks: list[int]
    num_children: int = 0
    block_hash: bytes = b""
    state: int = NO_STATE


def make_key(parent: Parent, token_ids: SequenceOf[int]) -> Key:
    """The key of a block of these tokens after `parent`."""
    return parent, array("i", token_ids).tobytes()


def hash_of(parent: Parent) -> bytes:
    """The block hash of a node or a root."""
    unknown: list[PrefixNode] = []
    while isinstance(parent, PrefixNode) and not parent.block_hash:
        unknown.append(parent)
        parent = parent.key[0]
    last = parent.block_hash
    for node in reversed(unknown):
        last = node.block_hash = block_hash(last, node.key[1])
    return last


class CacheWatch(Protocol):
    """Observes a prefix cache."""

    def stored(self, node: PrefixNode, group: int) -> None:
        """A node got a block in a group."""
        ...

    def removed(self, node: PrefixNode, group: int) -> None:
        """A node lost its block in a group."""
        ...


class PrefixCache:
    """The nodes of all blocks of known content.

    Args:
        num_groups: number of cache groups.

    Attributes:
        watch: observes every block; None: no observer.
    """

    def __init__(self, num_groups: int = 1) -> None:
        self._num_groups = num_groups
        self.watch: CacheWatch | None = None
        self._nodes: dict[Key, PrefixNode] = {}
        self._place_of_block: dict[int, tuple[PrefixNode, int]] = {}  # its node and its group

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: int) -> bool:
        """Whether this block's content is known."""
        return block in self._place_of_block

    def find(self, key: Key) -> PrefixNode | None:
        """The node of this key, if it or any node below it has a block."""
        return self._nodes.get(key)

    def node_of(self, block: int) -> PrefixNode | None:
        """The node of a block's content, if known."""
        node, _ = self._place_of_block.get(block, (None, 0))
        return node

    def add(self, key: Key) -> PrefixNode:
        """Add a node for a new key, without blocks yet (`put`)."""
        node = self._nodes[key] = PrefixNode(key, [NO_BLOCK] * self._num_groups)
        parent = key[0]
        if isinstance(parent, PrefixNode):
            parent.num_children += 1
        return node

    def put(self, node: PrefixNode, group: int, block: int) -> None:
        """Register a block as a node's in a group; neither may be registered there yet."""
        node.blocks[group] = block
        self._place_of_block[block] = node, group
        if self.watch is not None:
            self.watch.stored(node, group)

    def forget(self, block: int) -> None:
        """Let a block's content be found no more."""
        node, group = self._place_of_block.pop(block)
        node.blocks[group] = NO_BLOCK
        if self.watch is not None:
            self.watch.removed(node, group)
        parent: Parent = node
        while isinstance(parent, PrefixNode) and self._is_useless(parent):
            del self._nodes[parent.key]
            parent = parent.key[0]
            if isinstance(parent, PrefixNode):
                parent.num_children -= 1

    def _is_useless(self, node: PrefixNode) -> bool:
        """Whether neither a node nor any node below it has a block. False for a removed node (its last child may have
        been reached through a sequence that still holds it)."""
        is_empty = node.num_children == 0 and all(block == NO_BLOCK for block in node.blocks)
        return is_empty and self._nodes.get(node.key) is node
