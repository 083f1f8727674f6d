"""`BlockStore`: what the scheduler asks of a place outside of the cache where blocks are kept. Plain data and one
protocol."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class BlockContent(NamedTuple):
    """What a block holds: by this it is found, and checked, wherever it is kept.

    Attributes:
        block_hash: its own; see `contracts.block_hash`.
        parent: the hash of the block before it, or of the root.
        token_ids: its tokens, as int32.
        group: the cache group whose keys and values it holds.
    """

    block_hash: bytes
    parent: bytes
    token_ids: bytes
    group: int


class Loading(Protocol):
    """Blocks on their way into the cache.

    Attributes:
        is_done: whether no more of them will come.
        num_loaded: how many of the first ones are there.
    """

    @property
    def is_done(self) -> bool: ...

    @property
    def num_loaded(self) -> int: ...


class BlockStore(Protocol):
    """Keeps blocks outside of the cache. All methods return at once, except those that say that they wait."""

    def has(self, block_hash: bytes, group: int) -> bool:
        """Whether a block may be here. Only loading it shows."""
        ...

    def is_faster(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether `num_blocks` are loaded in less time than `num_tokens` are computed."""
        ...

    def load(self, blocks: Sequence[tuple[BlockContent, int]]) -> Loading:
        """Begin to read contents into blocks of the cache, in this order, up to the first that cannot be had. Nobody
        else may read or write these blocks until that is done."""
        ...

    def save(self, content: BlockContent, block: int, is_current: Callable[[], bool]) -> None:
        """Write a block in the background.

        Args:
            is_current: whether the block still holds this; asked before and after it is read.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Wait until some loading is done, at most so long."""
        ...
