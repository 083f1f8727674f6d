"""`Reuse`: shares blocks that are in the cache, or computed in the same step.

Full blocks are shared by content (the prefix cache), a sibling's prompt by forking. Blocks can be found as soon as
their step is planned, because a backend finishes all writes of a layer before any read. If the step fails, they are
removed, and sequences that relied on them start over. A model with recurrent states can continue only where a state is
kept (`States`). Knows nothing of budgets, slots and queues.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from inflight.contracts.step.block_hash import Root
from inflight.contracts.step.plan import NO_BLOCK, NO_STATE
from inflight.scheduling.block_pool import BlockPool
from inflight.scheduling.prefix_cache import PrefixNode
from inflight.scheduling.sequence import Sequence
from inflight.scheduling.states import States

LEAST_AWAITED = 8
"""Blocks for which a sequence waits, if the step being planned computes them; it computes fewer itself."""


class Reuse:
    """Shares the blocks of one pool among sequences.

    Args:
        block_pool: the cache's blocks.
        enable_prefix_caching: whether blocks are found by content; if not, sequences only fork.
        recompute_beyond: sequences longer than this share only among themselves; None: no such length.
        can_share: whether a sequence can continue from another's blocks; if not, nothing is shared.
        num_states: recurrent states of the cache; 0: the model has none, or keeps them itself.
        num_slots: the most sequences that run at once.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        enable_prefix_caching: bool,
        recompute_beyond: int | None,
        *,
        can_share: bool = True,
        num_states: int = 0,
        num_slots: int = 0,
    ) -> None:
        self.block_pool = block_pool
        self.enable_prefix_caching = enable_prefix_caching and can_share
        self.least_awaited = LEAST_AWAITED
        self.states: States | None = None
        if num_states:
            self.states = States(num_states, num_slots, block_pool, makes_checkpoints=self.enable_prefix_caching)
        self.can_share = can_share
        self.save: Callable[[int], None] | None = None
        """Called with each full block once it is computed and can be found; None: no listener."""
        self.recompute_beyond = recompute_beyond
        self.num_cached_tokens = 0
        """Prompt tokens taken from the cache when their sequences first ran."""
        self.copies: list[tuple[int, int]] = []
        """Blocks to copy, (source, destination), before the step in flight or the next one."""
        self._blocks_in_flight: list[int] = []  # findable already, valid once the step has succeeded
        # Sequences that rely on that step, and the number of computed tokens each had before it:
        self._num_computed_before: dict[Sequence, int] = {}

    # ------------------------------------------------------------------------------------- taking

    def take(self, sequence: Sequence, siblings: Iterable[Sequence]) -> None:
        """Let a sequence take cached blocks of all but its last token, before it computes more."""
        num_known, block_size = sequence.num_known_blocks, self.block_pool.block_size
        if not sequence.num_computed_tokens == sequence.num_blocks * block_size == num_known * block_size:
            return  # within a block
        nodes = self._known(sequence)
        if self.states is not None:
            self.states.choose_checkpoints(sequence, (num_known + len(nodes)) * block_size)
        if nodes := self._usable(sequence, nodes):
            sequence.parent = nodes[-1]
            sequence.num_known_blocks += len(nodes)
            num_tokens = sequence.num_known_blocks * block_size
            blocks = list(zip(*(node.blocks for node in nodes), strict=True))
            self.block_pool.share(sequence.block_tables, num_tokens, blocks)
            self.take_over(sequence, num_tokens)
            if self.states is not None:
                self.states.continue_from(sequence, nodes[-1])
        if (source := self.fork_source(sequence, siblings)) is not None:
            self.fork(sequence, source)

    def find(self, sequence: Sequence) -> list[PrefixNode]:
        """The nodes after a sequence's known blocks that it can take. They never include its last token."""
        return self._usable(sequence, self._known(sequence))

    def waits_for_state(self, sequence: Sequence) -> bool:
        """Whether the step being planned computes many tokens that a sequence begins with. It then leaves a state at
        the last of them."""
        if self.states is None or not self._blocks_in_flight:
            return False
        nodes = self._known(sequence)
        if len(nodes) - len(self._usable(sequence, nodes)) < self.least_awaited:
            return False
        if set(nodes[-1].blocks).isdisjoint(self._blocks_in_flight):
            return False
        self.states.want(nodes[-1])
        return True

    def _known(self, sequence: Sequence) -> list[PrefixNode]:
        """The nodes after a sequence's known blocks."""
        nodes: list[PrefixNode] = []
        if not self.enable_prefix_caching or sequence.computes_prompt:
            return nodes
        block_size, parent = self.block_pool.block_size, sequence.parent
        for start in range(sequence.num_known_blocks * block_size, len(sequence.token_ids) - block_size, block_size):
            node = self.block_pool.find(sequence.key_of(parent, start, start + block_size))
            if node is None:
                break
            nodes.append(node)
            parent = node
        return nodes

    def _usable(self, sequence: Sequence, nodes: list[PrefixNode]) -> list[PrefixNode]:
        """The nodes after a sequence's blocks that it can share: every cache group must have all blocks that a query
        after the last of them sees, and states must be kept there, if there are any."""
        num_usable, block_size, groups = 0, self.block_pool.block_size, self.block_pool.layout.groups
        if not any(NO_BLOCK in node.blocks for node in nodes):
            if self.states is None:
                return nodes
            places = range(len(nodes), 0, -1)
            return nodes[: next((place for place in places if nodes[place - 1].state != NO_STATE), 0)]
        num_there = [len(table) - table.count(NO_BLOCK) for table in sequence.block_tables]  # at the end, without a gap
        for number, node in enumerate(nodes, 1):
            end = (sequence.num_known_blocks + number) * block_size
            num_there = [0 if b == NO_BLOCK else n + 1 for n, b in zip(num_there, node.blocks, strict=True)]
            are_seen = zip(num_there, groups, strict=True)
            if self._has_state(node) and all(n * block_size >= end - g.first_visible(end) for n, g in are_seen):
                num_usable = number
        return nodes[:num_usable]

    def _has_state(self, node: PrefixNode) -> bool:
        """Whether a sequence can continue from a node, as far as states are concerned."""
        return self.states is None or node.state != NO_STATE

    def fork_source(self, sequence: Sequence, siblings: Iterable[Sequence]) -> Sequence | None:
        """A running sibling under the same root that has already computed the prompt, except perhaps its last token."""
        num_shared = sequence.num_prompt_tokens - 1
        if sequence.num_computed_tokens >= num_shared or sequence.computes_prompt or not self.can_share:
            return None
        if self.states is not None:
            return None  # it continues from a checkpoint
        for sibling in siblings:
            if not self.is_computing_prompt(sibling) and self.block_pool.holds(sibling.block_tables, num_shared):
                return sibling
        return None

    def is_computing_prompt(self, sequence: Sequence) -> bool:
        """Whether more than the last token of its prompt is still uncomputed."""
        num_computed = self._num_computed_before.get(sequence, sequence.num_computed_tokens)
        return num_computed < sequence.num_prompt_tokens - 1

    def fork(self, sequence: Sequence, source: Sequence) -> None:
        """Share the blocks of a sibling's prompt, and copy the last block if both will write to it."""
        num_tokens = sequence.num_prompt_tokens - 1
        num_shared, num_copied = divmod(num_tokens, self.block_pool.block_size)
        if num_copied and self.block_pool.num_available < len(source.block_tables):
            return
        shared = [table[sequence.num_blocks : num_shared] for table in source.block_tables]
        self.block_pool.share(sequence.block_tables, num_tokens, shared)
        if num_copied:
            self.block_pool.grow(sequence.block_tables, num_tokens)
            for theirs, own in zip(source.block_tables, sequence.block_tables, strict=True):
                self.copies.append((theirs[num_shared], own[num_shared]))
        parent, num_known = source.parent, source.num_known_blocks
        while num_known > num_shared and isinstance(parent, PrefixNode):
            parent, num_known = parent.key[0], num_known - 1
        if num_known > sequence.num_known_blocks:
            sequence.parent, sequence.num_known_blocks = parent, num_known
        self.take_over(sequence, num_tokens)

    def num_missing_blocks(
        self, sequence: Sequence, siblings: Iterable[Sequence], *, takes_kept: bool = True
    ) -> tuple[int, set[int]]:
        """The number of blocks that a waiting sequence lacks for all its tokens; and, if any, the used blocks that it
        would share.

        Args:
            takes_kept: whether it may take blocks that are kept for others.
        """
        pool = self.block_pool
        num_available = pool.num_available - (0 if takes_kept else pool.num_kept)
        num_missing = pool.layout.max_num_blocks(len(sequence.token_ids)) - num_available
        if num_missing <= 0:
            return num_missing, set()
        found, block_size = self.find(sequence), pool.block_size
        num_tokens = len(found) * block_size
        blocks: list[SequenceOf[int]] = [[node.blocks[g] for node in found] for g in range(len(pool.layout.groups))]
        if (source := self.fork_source(sequence, siblings)) is not None:
            num_tokens = sequence.num_prompt_tokens - 1
            blocks = [table[: num_tokens // block_size] for table in source.block_tables]
        seen = (
            row[group.first_visible(num_tokens) // block_size :]
            for group, row in zip(pool.layout.groups, blocks, strict=True)
        )
        is_shared = pool.num_holders if takes_kept else lambda block: pool.num_holders(block) or pool.is_kept(block)
        shared = {block for row in seen for block in row if is_shared(block)}
        return num_missing - len(shared), shared

    def take_over(self, sequence: Sequence, num_tokens: int) -> None:
        """Count the first `num_tokens` tokens of a sequence as computed by others."""
        num_new = num_tokens - sequence.num_computed_tokens
        if num_new == 0:
            return
        self._num_computed_before.setdefault(sequence, sequence.num_computed_tokens)
        sequence.num_computed_tokens = num_tokens
        if sequence.num_preemptions == 0 and sequence.num_output_tokens == 0:
            sequence.num_cached_tokens += num_new
            self.num_cached_tokens += num_new

    # ------------------------------------------------------------------------------------- giving

    def remember(self, sequence: Sequence, num_tokens: int, *, in_flight: bool = False) -> None:
        """Add the full blocks of a sequence's first `num_tokens` tokens to the prefix cache.

        If another block has the content already, the sequence frees its own block and takes that one.

        Args:
            in_flight: whether the step being planned has yet to compute some of the tokens.
        """
        if not self.enable_prefix_caching or sequence.request.left_to_generate:
            return
        block_size = self.block_pool.block_size
        while (sequence.num_known_blocks + 1) * block_size <= num_tokens:
            index = sequence.num_known_blocks
            key = sequence.key_of(sequence.parent, index * block_size, (index + 1) * block_size)
            node = self.block_pool.find(key)
            if node is None:
                if all(table[index] == NO_BLOCK for table in sequence.block_tables):
                    break  # shared by a sibling after it had left every window
                node = self.block_pool.add(key)
            elif in_flight and any(
                NO_BLOCK != table[index] != block != NO_BLOCK
                for table, block in zip(sequence.block_tables, node.blocks, strict=True)
            ):
                break  # the step writes to its own blocks; other sequences find the known ones
            for group, (table, block) in enumerate(zip(sequence.block_tables, tuple(node.blocks), strict=True)):
                own = table[index]
                if block == NO_BLOCK != own:
                    self.block_pool.remember(node, group, own)
                    if in_flight:
                        self._blocks_in_flight.append(own)
                    elif self.save is not None:
                        self.save(own)
                elif NO_BLOCK != own != block:
                    self.block_pool.replace(table, index, block)
            sequence.parent = node
            sequence.num_known_blocks += 1
        if in_flight:
            self._num_computed_before.setdefault(sequence, sequence.num_computed_tokens)

    # ------------------------------------------------------------------------------------- the end of a step

    def step_succeeded(self) -> None:
        """The step succeeded: its blocks are valid."""
        if self.save is not None:
            for block in self._blocks_in_flight:
                self.save(block)
        self._blocks_in_flight.clear()
        self._num_computed_before.clear()
        self.copies.clear()

    def step_failed(self) -> list[Sequence]:
        """The step failed: remove its blocks. Returns the sequences that relied on it or whose states it advanced, to
        `start_over`."""
        for block in self._blocks_in_flight:
            self.block_pool.forget(block)
        self._blocks_in_flight.clear()
        changed = dict.fromkeys(self._num_computed_before)
        if self.states is not None:
            changed |= dict.fromkeys(self.states.in_flight)
        self.step_succeeded()
        return list(changed)

    def start_over(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks; it must recompute all of its tokens."""
        if sequence.num_output_tokens == 0 and sequence.num_preemptions == 0:
            self.num_cached_tokens -= sequence.num_cached_tokens
            sequence.num_cached_tokens = 0
        self.give_back(sequence)
        self.forget_progress(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Free all blocks and states of a sequence, and drop copies to blocks that are no longer referenced."""
        self.block_pool.release(sequence.block_tables)
        if self.states is not None:
            self.states.release(sequence)
        self.copies = [copy for copy in self.copies if self.block_pool.num_holders(copy[1])]

    def forget_progress(self, sequence: Sequence) -> None:
        """Reset a sequence to nothing computed, as at its arrival or after a preemption."""
        self._num_computed_before.pop(sequence, None)
        sequence.num_computed_tokens = sequence.num_known_blocks = 0
        is_long = self.recompute_beyond is not None and len(sequence.token_ids) > self.recompute_beyond
        request = sequence.request
        sequence.root = sequence.parent = Root(request.cache_salt, is_long, request.adapter)
