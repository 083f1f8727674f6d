"""What must be true between any two operations about sequences, blocks, prefix cache and contents."""

from collections import Counter
from typing import TYPE_CHECKING

from inflight.contracts.step.plan import NO_BLOCK, NO_STATE
from tests.properties.model_cache import of_group

if TYPE_CHECKING:
    from tests.properties.world import World


def check(world: "World") -> None:
    """Check everything that must hold between any two operations."""
    check_sequences(world)
    check_blocks(world)
    check_prefix_cache(world)
    check_states(world)
    if world.in_flight is None:
        check_contents(world)


def check_sequences(world: "World") -> None:
    sequences = list(world.scheduler.unfinished())
    num_running = world.scheduler.num_running
    assert len(sequences) == len(world.unfinished) == num_running + world.scheduler.num_waiting
    running = sorted(world.running(), key=world.service_order)
    waiting = sorted((e for e in world.unfinished.values() if not e.is_running), key=world.service_order)
    assert [each.sequence_id for each in [*running, *waiting]] == [each.sequence_id for each in sequences]
    assert set(world.scheduler.sequences.of_request) == {each.request.request_id for each in world.unfinished.values()}
    for each in world.unfinished.values():
        sequence = each.sequence
        assert sequence.token_ids == each.token_ids
        assert sequence.finish_reason is None
        assert sequence.num_computed_tokens == each.num_computed
        assert 0 <= sequence.num_cached_tokens < sequence.num_prompt_tokens
        if each.is_running:
            assert sequence.slot is not None
            assert world.scheduler.running(sequence.sequence_id) is sequence
            assert world.lanes.owners[sequence.slot] == sequence.sequence_id, "a sequence keeps its slot"
        else:
            assert (sequence.slot, sequence.num_blocks, sequence.num_computed_tokens) == (None, 0, 0)
    assert world.scheduler.count.preemptions == world.num_preemptions


def check_blocks(world: "World") -> None:
    """Reference counts match the tables, and free + used + cached = all."""
    tables = [each.sequence.block_tables for each in world.unfinished.values()]
    if world.in_flight is not None:  # blocks of ended sequences are kept until the step in flight has landed
        ended = [each.sequence for each in world.hit if each.finish_reason is not None]
        assert all(sequence.slot is not None and sequence.num_blocks for sequence in ended)
        tables += [sequence.block_tables for sequence in ended]
    tables += [sequence.block_tables for sequence in world.left()]
    tables += [restoration.tables for restoration in world.scheduler.persistence._restorations]
    world.pool.check(tables)
    held = {block for of_sequence in tables for table in of_sequence for block in table}
    assert world.pool.num_used == len(held - {NO_BLOCK})
    assert world.pool.num_free + world.pool.num_used + world.pool.num_cached == world.pool.num_blocks


def check_states(world: "World") -> None:
    """Each state is in use, a checkpoint, or free; and has the content that it is known by."""
    if world.states is None:
        return
    states = world.scheduler.reuse.states
    assert states is not None
    held = Counter(each.sequence.state for each in world.unfinished.values() if each.sequence.state != NO_STATE)
    if world.in_flight is not None:
        held += Counter(e.sequence.state for e in world.hit if e.finish_reason is not None and e.sequence.state >= 0)
        held += Counter(s for span in world.in_flight.spans for _, s in span.states if s != span.state)
    held += Counter(each.state for each in world.scheduler.persistence._restorations)
    assert {state: number for state, number in enumerate(states._num_references) if number} == held
    others = [*states._free, *states._replaced, *states._cached, *range(states._num_touched, states.num_states)]
    assert sorted(others) == [state for state in range(states.num_states) if not held[state]]
    assert states.num_available == len(others)
    assert states._node_of.keys() >= states._replaced.keys() | states._cached.keys()
    for state, node in states._node_of.items():
        assert node.state == state
        root, token_ids = world.content_of(node)
        expected = [(i, token, root.is_long, root.cache_salt) for i, token in enumerate(token_ids)]
        assert world.states.states[state] == expected, "a checkpoint has the content of its node"
    if world.in_flight is None:
        for each in world.unfinished.values():
            if each.sequence.state != NO_STATE:
                assert world.states.states[each.sequence.state] == world.past(each, each.num_computed)


def check_prefix_cache(world: "World") -> None:
    """A node is known while any of its blocks or descendants is known, and its blocks have its content."""
    nodes = world.known_nodes()
    assert world.sizes.prefix_caching or not nodes
    num_children = Counter(node.key[0] for node in nodes)
    in_flight = set(world.scheduler.reuse._blocks_in_flight) if world.in_flight is not None else set()
    block_size = world.pool.block_size
    for node in nodes:
        root, before = world.content_of(node.key[0])
        own = tuple(memoryview(node.key[1]).cast("i"))
        assert world.content_of(node) == (root, (*before, *own)), "a node's content never changes"
        assert node.num_children >= num_children[node]
        assert node.num_children or any(block != NO_BLOCK for block in node.blocks)
        for group, block in enumerate(node.blocks):
            if block == NO_BLOCK:
                continue
            assert world.pool.node_of(block) is node
            if block not in in_flight:
                places = world.cache.places[block * block_size : (block + 1) * block_size]
                past = [(i, token, root.is_long, root.cache_salt) for i, token in enumerate(own, len(before))]
                expected = [of_group(place, group) for place in past]
                assert places == expected, "the cache never returns a block with other content"


def check_contents(world: "World") -> None:
    """Everything that a running sequence counts as computed is in the cache, and other sequences find it too."""
    to_copy = {destination for _, destination in world.scheduler.reuse.copies}
    for each in world.running():
        num_computed = each.num_computed
        for group, table in enumerate(each.sequence.block_tables):
            if not to_copy.isdisjoint(table):
                continue
            first = world.sizes.first_seen(group, num_computed)
            expected = [of_group(place, group) for place in world.past(each, num_computed)[first:]]
            assert world.cache.read(table, first, num_computed) == expected
            if world.sizes.prefix_caching and world.sizes.sharing:
                for index in range(num_computed // world.pool.block_size):
                    if table[index] != NO_BLOCK:
                        node = world.pool.node_of(table[index])
                        assert node is not None
                        content = list(world.content_of(node)[1])
                        assert content == each.token_ids[: (index + 1) * world.pool.block_size]
