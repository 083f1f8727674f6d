"""Block hashes: one name for a full block of tokens, all tokens before it, and what else its keys and values depend on.

Each hash is made of the one before it (vLLM, Kwon et al., SOSP 2023). It is the same in every process and on every
machine. Whatever names blocks uses these: the prefix store, cache events, the router and recordings. Only the prefix
cache itself compares the tokens, so that no collision can hand one request's keys and values to another.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

HASH_SIZE = 32


class Root(NamedTuple):
    """What must be equal besides the tokens for keys and values to be the same.

    Attributes:
        cache_salt: the request's; requests with different salts never share.
        is_long: whether they belong to a sequence longer than the scheduler's `recompute_beyond`.
        adapter: the digest of the adapter that they were computed with; None: with none.
    """

    cache_salt: str | None = None
    is_long: bool = False
    adapter: str | None = None

    @property
    def block_hash(self) -> bytes:
        """What stands before the first block's tokens."""
        return blake2b(repr(tuple(self)).encode(), digest_size=HASH_SIZE, person=b"inflight root").digest()


def block_hash(parent: bytes, token_ids: bytes) -> bytes:
    """The hash of a block.

    Args:
        parent: the hash of the block before it, or of the root.
        token_ids: its tokens, as int32.
    """
    return blake2b(parent + token_ids, digest_size=HASH_SIZE).digest()


ENCODER_OUTPUTS = blake2b(b"", digest_size=HASH_SIZE, person=b"encoder outputs").digest()
"""What stands before the digest of an image or a sound, instead of tokens."""


def block_hashes(token_ids: Sequence[int], block_size: int, root: Root) -> Iterator[bytes]:
    """The hash of each full block of a sequence."""
    number, tokens = root.block_hash, array("i", token_ids)
    for end in range(block_size, len(tokens) + 1, block_size):
        number = block_hash(number, tokens[end - block_size : end].tobytes())
        yield number
