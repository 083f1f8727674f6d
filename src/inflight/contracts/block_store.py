"""`BlockStore`: the scheduler's view of a store that keeps blocks outside the cache. Plain data and protocols."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class BlockContent(NamedTuple):
    """The content of a block. A store finds it by this, and checks it.

    Attributes:
        digest: of its tokens, all before them, and everything else that its keys and values depend on.
        parent: the digest of the block before it; for the first block, that of the chain's start.
        token_ids: its tokens, as int32.
        group: the cache group whose keys and values it holds.
    """

    digest: bytes
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

    def digest_of_root(self, cache_salt: str | None, is_long: bool, adapter: str | None = None) -> bytes:
        """The parent digest of a first block; see `Root`."""
        ...

    def digest(self, parent: bytes, token_ids: bytes) -> bytes:
        """The digest of a block of these tokens after `parent`."""
        ...

    def has(self, digest: bytes, group: int) -> bool:
        """Whether the store may have a block. Only loading it tells for certain."""
        ...

    def is_faster(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether loading `num_blocks` takes less time than computing `num_tokens`."""
        ...

    def load(self, blocks: Sequence[tuple[BlockContent, int]]) -> Loading:
        """Start loading contents into blocks of the cache, in order, up to the first that fails. Until it is done,
        nothing else may read or write these blocks."""
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
