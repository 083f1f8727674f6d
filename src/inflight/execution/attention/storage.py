"""Memory for the attention calls of a forward pass: calls of different cache groups lie in the same storages."""

from inflight.execution.attention.grouping import Grouping
from inflight.execution.attention.interface import AttentionBackend, KVStorage


def allocate_storages(
    backend: AttentionBackend, grouping: Grouping, num_blocks: int
) -> tuple[list[KVStorage], list[KVStorage]]:
    """The storage of each attention call, in order; and those that have memory of their own."""

    def storage_of(call: int, beside: KVStorage | None) -> KVStorage:
        num_parts = (num_blocks + 1) * grouping.part_of(call).num_parts  # the last block is spare
        return backend.allocate(num_parts - 1, grouping.specs[call], beside)

    of_calls: dict[int, KVStorage] = {}
    owners: list[KVStorage] = []
    for first, *others in grouping.storages():
        of_calls[first] = storage_of(first, None)
        of_calls |= {call: storage_of(call, of_calls[first]) for call in others}
        owners.append(of_calls[first])
    for call, spec in enumerate(grouping.specs):
        if spec.shares_cache_with is not None:
            of_calls[call] = storage_of(call, of_calls[spec.shares_cache_with])
    return [of_calls[call] for call in range(len(grouping.specs))], owners
