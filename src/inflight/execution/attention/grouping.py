"""Cache groups: attention calls that share blocks. They keep the same tokens, and all groups' blocks have the same
size.

A block holds the keys and values of one group, and any group may take it. The calls of every group are laid out over
the same storages: one call per storage, or several calls in equal parts of its blocks if they keep fewer bytes per
token. So no memory is reserved for windows or for full attention, as in vLLM's hybrid cache manager.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from inflight.contracts.step.cache_layout import ALL_TOKENS, CacheGroup
from inflight.execution.attention import AttentionSpec
from inflight.execution.attention.interface import AttentionBackend, KVStorage

MAX_PADDING, MAX_PADDING_OF_WINDOWS = 0.1, 0.25
"""The most memory, as a share, wasted by groups with fewer calls than storages: for groups that keep all tokens, and
for groups with a window, which take less memory anyway."""
MAX_GROUPS = 16
"""The most groups; each costs a block table per sequence."""


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A part of a group's blocks.

    Attributes:
        group: index of the cache group.
        part, num_parts: in which of how many equal parts of a block. A part is numbered as if it were a block:
            `block * num_parts + part`.
    """

    group: int
    part: int = 0
    num_parts: int = 1


@dataclass(frozen=True, slots=True)
class Grouping:
    """The layout of attention calls in the cache.

    Attributes:
        specs: the calls in order; their `cache_group` is an index into `parts`.
        groups: the cache groups; groups that keep all tokens come first.
        parts: the parts of their blocks.
        is_transient: whether all calls reuse the same memory in turn, because no later step reads it.
    """

    specs: tuple[AttentionSpec, ...]
    groups: tuple[CacheGroup, ...] = (ALL_TOKENS,)
    parts: tuple[BlockPart, ...] = (BlockPart(0),)
    is_transient: bool = False

    @property
    def has_parts(self) -> bool:
        """Whether some calls have only a part of each block."""
        return any(part.num_parts > 1 for part in self.parts)

    def storages(self) -> list[list[int]]:
        """For each storage, the ordinals of its calls; the first has whole blocks."""
        if self.is_transient:
            return [list(range(len(self.specs)))]
        by_part: list[list[int]] = [[] for _ in self.parts]
        for number, spec in enumerate(self.specs):
            if spec.shares_cache_with is None:
                by_part[spec.cache_group].append(number)
        storages = [[own[k] for own in by_part if k < len(own)] for k in range(max(map(len, by_part)))]
        return [sorted(calls, key=lambda call: self.part_of(call).num_parts) for calls in storages]

    def part_of(self, call: int) -> BlockPart:
        """The part of the call of this ordinal."""
        return self.parts[self.specs[call].cache_group]


def group_calls(
    specs: Sequence[AttentionSpec], max_model_len: int, bytes_per_block: Callable[[AttentionSpec], int]
) -> Grouping:
    """Divide attention calls into cache groups.

    All calls become one group that keeps everything if they cannot be divided into a few groups of about equal memory,
    if a call sees more of another's shared keys and values than that call itself, or if texts run whole because queries
    see later keys.

    Args:
        specs: the calls in order.
        bytes_per_block: the bytes that a call takes in the attention backend.
    """
    if not specs:
        return Grouping(())
    if not all(spec.is_causal for spec in specs):
        sizes = {(spec.num_kv_heads, spec.head_size, spec.value_head_size) for spec in specs}
        is_transient = len(sizes) == 1 and all(spec.shares_cache_with is None for spec in specs)
        return Grouping(tuple(specs), is_transient=is_transient)
    kept = [_kept_by(spec, max_model_len) for spec in specs]
    owners = [n if spec.shares_cache_with is None else spec.shares_cache_with for n, spec in enumerate(specs)]
    calls: dict[CacheGroup, list[int]] = {}
    for owner in dict.fromkeys(owners):
        calls.setdefault(kept[owner], []).append(owner)
    shapes = {each: [specs[number] for number in numbers] for each, numbers in calls.items()}
    num_parts = _parts_of_blocks(shapes, bytes_per_block)
    size = None if num_parts is None else _size_of_groups({each: len(calls[each]) for each in calls}, num_parts)
    if num_parts is None or size is None or kept != [kept[owner] for owner in owners]:
        return Grouping(tuple(specs))
    groups: list[CacheGroup] = []
    parts: list[BlockPart] = []
    part_of: dict[int, int] = {}
    for each, numbers in sorted(calls.items(), key=lambda item: item[0] != ALL_TOKENS):
        of = num_parts[each]
        for first in range(0, len(numbers), size * of):
            for place, number in enumerate(numbers[first : first + size * of]):
                part_of[number] = len(parts) + place % of
            parts += [BlockPart(len(groups), part, of) for part in range(of)]
            groups.append(each)
    grouped = (replace(spec, cache_group=part_of[owner]) for spec, owner in zip(specs, owners, strict=True))
    return Grouping(tuple(grouped), tuple(groups), tuple(parts))


def _kept_by(spec: AttentionSpec, max_model_len: int) -> CacheGroup:
    """The tokens that a call keeps. A window or chunk of at least `max_model_len` has no effect."""
    window, chunk = (None if each is None or each >= max_model_len else each for each in (spec.window, spec.chunk))
    return CacheGroup(window, chunk)


def _parts_of_blocks(
    calls: Mapping[CacheGroup, Sequence[AttentionSpec]], bytes_per_block: Callable[[AttentionSpec], int]
) -> dict[CacheGroup, int] | None:
    """The number of calls of each kind whose keys and values take the bytes of one of the largest; None if there is no
    such number, or if calls of one kind differ."""
    if len(calls) == 1:
        return dict.fromkeys(calls, 1)
    sizes = {
        each: {
            (bytes_per_block(spec), spec.num_kv_heads * spec.head_size, spec.num_kv_heads * spec.value_head_size)
            for spec in specs
        }
        for each, specs in calls.items()
    }
    largest = max(size for of_kind in sizes.values() for size in of_kind)
    num_parts = {}
    for each, of_kind in sizes.items():
        ratios = {whole / part for size in of_kind for whole, part in zip(largest, size, strict=True)}
        if len(ratios) > 1 or not min(ratios).is_integer():
            return None
        num_parts[each] = int(min(ratios))
    return num_parts


def _size_of_groups(num_calls: Mapping[CacheGroup, int], num_parts: Mapping[CacheGroup, int]) -> int | None:
    """The largest number of storages that each group can lie in, given the calls of each kind and parts of a block;
    None if that wastes too much memory or takes too many groups."""
    for size in range(max(number for each, number in num_calls.items() if num_parts[each] == 1), 0, -1):
        num_groups = {each: -(-number // (size * num_parts[each])) for each, number in num_calls.items()}
        if all(
            num_groups[each] * size * num_parts[each] / number
            < 1 + (MAX_PADDING if each == ALL_TOKENS else MAX_PADDING_OF_WINDOWS)
            for each, number in num_calls.items()
        ):
            return size if sum(num_groups.values()) <= MAX_GROUPS else None
    return None


def allocate_storages(
    backend: AttentionBackend, grouping: Grouping, num_blocks: int
) -> tuple[list[KVStorage], list[KVStorage]]:
    """The storage of each attention call, in order; and those with their own memory."""

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
