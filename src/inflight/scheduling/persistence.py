"""`Persistence`: saves blocks of the cache in a store, and loads them instead of computing them.

Before a request's sequences queue for slots, stored blocks of its prompt that the cache lacks may be loaded. Meanwhile
they are *parked*, and all others run. Loaded blocks go into the prefix cache, as if computed here; if loading fails,
they are computed. Each full block of known content is handed to the store to be saved. A checkpoint of recurrent
states is stored like a block, in a group after the others. The port is `BlockStore`.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from inflight.contracts.step.block_hash import block_hash
from inflight.contracts.step.plan import NO_BLOCK, NO_STATE
from inflight.scheduling.block_pool import BlockPool, BlockTables
from inflight.scheduling.prefix_cache import Parent, PrefixNode, hash_of
from inflight.scheduling.sequence import Sequence
from inflight.scheduling.states import States

LARGEST_SHARE = 0.5
"""The most of the cache that blocks being loaded may take."""


class BlockContent(NamedTuple):
    """The content of a block. A store finds it by this, and checks it.

    Attributes:
        block_hash: its own; see `contracts.step.block_hash`.
        parent: the hash of the block before it, or of the root.
        token_ids: its tokens, as int32.
        group: the cache group whose keys and values it holds; the number of groups: it is a recurrent state.
    """

    block_hash: bytes
    parent: bytes
    token_ids: bytes
    group: int


class Loading(Protocol):
    """Blocks on their way into the cache.

    Attributes:
        is_done: whether no more blocks will come.
        num_loaded: how many blocks, from the first, are loaded.
    """

    @property
    def is_done(self) -> bool: ...

    @property
    def num_loaded(self) -> int: ...


class BlockStore(Protocol):
    """Keeps blocks outside the cache. Methods return at once unless they say that they wait."""

    def has(self, block_hash: bytes, group: int) -> bool:
        """Whether a block may be here. Only loading it shows."""
        ...

    def is_faster(self, num_blocks: int, num_states: int, num_tokens: int) -> bool:
        """Whether loading blocks and recurrent states takes less time than computing tokens."""
        ...

    def load(self, blocks: SequenceOf[tuple[BlockContent, int]]) -> Loading:
        """Start loading contents into blocks of the cache, in order, up to the first that fails. Until it is done,
        nothing else may read or write these blocks. Numbers after those of blocks are states'."""
        ...

    def save(self, content: BlockContent, block: int, is_current: Callable[[], bool]) -> None:
        """Write a block in the background.

        Args:
            is_current: whether the block still holds this; asked before and after it is read.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Wait until one load is done, at most this many seconds."""
        ...


@dataclass(slots=True, eq=False)
class Restoration:
    """Blocks being loaded into the cache.

    Attributes:
        parent, num_before: the node before the first of them, and the number of blocks before it.
        chain: the tokens of each block from the first on.
        contents: of each block to load, its place in the chain and its content.
        tables: hold these blocks, and those before them.
        state: the last of the contents is loaded into it; `NO_STATE`: there are no states.
        parked: the sequences that wait for them.
    """

    loading: Loading
    parent: Parent
    num_before: int
    chain: list[bytes]
    contents: list[tuple[int, BlockContent]]
    tables: BlockTables
    state: int
    parked: list[Sequence]


class Persistence:
    """One scheduler's use of a store.

    Args:
        store: None: there is none.
        find: returns the cached nodes that a sequence can begin with (see `Reuse.find`).
        states: None: the model has none.
    """

    def __init__(
        self,
        store: BlockStore | None,
        block_pool: BlockPool,
        find: Callable[[Sequence], list[PrefixNode]],
        states: States | None = None,
    ) -> None:
        self._store = store
        self._states = states
        self.num_restored_tokens = 0
        self._block_pool = block_pool
        self._find = find
        self._restorations: list[Restoration] = []
        self._on_its_way: dict[bytes, Restoration] = {}  # by the hash of each block that is loaded

    @property
    def is_waiting(self) -> bool:
        """Whether anything is being loaded."""
        return bool(self._restorations)

    def parked(self) -> Iterator[Sequence]:
        """The parked sequences."""
        for restoration in self._restorations:
            yield from restoration.parked

    # ------------------------------------------------------------------------------------- taking

    def park(self, sequences: list[Sequence]) -> bool:
        """Park the sequences of a request if loading stored blocks of their prompt pays."""
        first, pool, size = sequences[0], self._block_pool, self._block_pool.block_size
        if (store := self._store) is None or first.wants_scores:
            return False
        nodes = self._find(first)
        parent: Parent = nodes[-1] if nodes else first.root
        chain, contents = self._stored(store, first, parent, len(nodes))
        if not contents:
            return False
        if (same := self._on_its_way.get(contents[0][1].block_hash)) is not None:
            same.parked += sequences
            return True
        tables, num_tokens = pool.new_tables(), (len(nodes) + len(chain)) * size
        room = min(pool.num_available - pool.num_kept, int(pool.num_blocks * LARGEST_SHARE))
        num_states = int(self._states is not None)
        num_blocks = len(contents) - num_states
        if len(chain) * len(tables) > room or not store.is_faster(num_blocks, num_states, len(chain) * size):
            return False
        shared = list(zip(*(node.blocks for node in nodes), strict=True)) or [()] * len(tables)
        pool.share(tables, len(nodes) * size, shared)
        if not pool.grow(tables, num_tokens):
            pool.release(tables)
            return False
        pool.release_before(tables, num_tokens)
        state = NO_STATE
        if self._states is not None and (state := self._states.take_to_load()) == NO_STATE:
            pool.release(tables)
            return False
        blocks = [
            (each, tables[each.group][len(nodes) + place] if each.group < len(tables) else pool.num_blocks + state)
            for place, each in contents
        ]
        restoration = Restoration(store.load(blocks), parent, len(nodes), chain, contents, tables, state, sequences)
        self._restorations.append(restoration)
        self._on_its_way |= {content.block_hash: restoration for _, content in contents}
        return True

    def _starts(self, sequence: Sequence) -> range:
        """The first position of each full block. The last token is excluded, because it is always computed."""
        size = self._block_pool.block_size
        return range(0, (len(sequence.token_ids) - 1) // size * size, size)

    def _stored(
        self, store: BlockStore, sequence: Sequence, parent: Parent, num_before: int
    ) -> tuple[list[bytes], list[tuple[int, BlockContent]]]:
        """The tokens of the blocks after `num_before` that may be stored, and of these blocks what a token after them
        sees, each with its place among them. They end where none of that is missing."""
        size, groups = self._block_pool.block_size, self._block_pool.layout.groups
        chain: list[bytes] = []
        there: list[list[BlockContent]] = []
        number = hash_of(parent)
        for start in self._starts(sequence)[num_before:]:
            _, token_ids = sequence.key_of(parent, start, start + size)
            before, number = number, block_hash(number, token_ids)
            found = [group for group in range(len(groups) + (self._states is not None)) if store.has(number, group)]
            if not found:
                break
            chain.append(token_ids)
            there.append([BlockContent(number, before, token_ids, group) for group in found])
        while chain:
            end = (num_before + len(chain)) * size
            firsts = [max(0, group.first_visible(end) // size - num_before) for group in groups]
            has_block = min(firsts) < len(chain)  # no node has a state alone
            if self._states is not None:
                firsts.append(len(chain) - 1)
            is_last_whole = has_block and len(there[-1]) == len(firsts)
            contents = [(place, each) for place, of in enumerate(there) for each in of if place >= firsts[each.group]]
            if is_last_whole and len(contents) == sum(len(chain) - first for first in firsts):
                return chain, contents
            chain.pop()
            there.pop()
        return [], []

    def take_in(self, *, may_load: bool) -> list[Sequence]:
        """Add loaded blocks to the prefix cache, and return the sequences that need wait no longer.

        Args:
            may_load: whether more may be loaded for them.
        """
        ready: list[Sequence] = []
        for restoration in [each for each in self._restorations if each.loading.is_done]:
            self._restorations.remove(restoration)
            for _, content in restoration.contents:
                self._on_its_way.pop(content.block_hash, None)
            self._remember(restoration)
            self._block_pool.release(restoration.tables)
            if self._states is not None:
                self._states.loaded(restoration.state)
            of_requests: dict[int, list[Sequence]] = {}
            for sequence in restoration.parked:
                of_requests.setdefault(id(sequence.request), []).append(sequence)
            for sequences in of_requests.values():
                has_helped = len(self._find(sequences[0])) > restoration.num_before
                if not (may_load and has_helped and self.park(sequences)):
                    ready += sequences
        return ready

    def _remember(self, restoration: Restoration) -> None:
        """Add loaded blocks to the prefix cache."""
        pool, parent = self._block_pool, restoration.parent
        if isinstance(parent, PrefixNode) and pool.find(parent.key) is not parent:
            return  # removed, because the step that computed it failed
        loaded = restoration.contents[: restoration.loading.num_loaded]
        nodes: list[PrefixNode] = []
        for token_ids in restoration.chain[: 1 + loaded[-1][0] if loaded else 0]:
            key = parent, token_ids
            parent = pool.find(key) or pool.add(key)
            nodes.append(parent)
        for place, content in loaded:
            if content.group == len(restoration.tables):
                assert self._states is not None
                self._states.remember(nodes[place], restoration.state)
            elif nodes[place].blocks[content.group] == NO_BLOCK:
                pool.remember(
                    nodes[place], content.group, restoration.tables[content.group][restoration.num_before + place]
                )
        self.num_restored_tokens += len(nodes) * pool.block_size

    def unpark(self, sequence: Sequence) -> bool:
        """A sequence has ended. Returns whether it was parked."""
        for restoration in self._restorations:
            if sequence in restoration.parked:
                restoration.parked.remove(sequence)
                return True
        return False

    # ------------------------------------------------------------------------------------- giving

    def save(self, block: int) -> None:
        """A full block was computed."""
        pool = self._block_pool
        if (node := pool.node_of(block)) is not None:
            number = pool.num_times_taken(block)
            self._save(node, node.blocks.index(block), block, lambda: pool.num_times_taken(block) == number)

    def save_state(self, state: int) -> None:
        """A checkpoint stays."""
        states, pool = self._states, self._block_pool
        assert states is not None
        node, number = states.node_of(state), states.num_times_taken(state)
        group, place = len(pool.layout.groups), pool.num_blocks + state
        self._save(node, group, place, lambda: states.num_times_taken(state) == number)

    def _save(self, node: PrefixNode, group: int, block: int, is_current: Callable[[], bool]) -> None:
        if self._store is not None:
            parent, token_ids = node.key
            content = BlockContent(hash_of(node), hash_of(parent), token_ids, group)
            self._store.save(content, block, is_current)
