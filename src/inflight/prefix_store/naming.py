"""`Naming`: what a block's file is called. Without the folder's secret key a name cannot be told from the tokens.

A name is a digest of the block's hash and of the fingerprint: of everything else that keys and values depend on.
"""

from hashlib import blake2b

KEY_SIZE = 32
DIGEST_SIZE = 32


class Naming:
    """The names of one fingerprint's blocks.

    Args:
        key: the folder's.
        fingerprint: of all that keys and values depend on besides tokens.
    """

    def __init__(self, key: bytes, fingerprint: bytes) -> None:
        self._key, self._fingerprint = key, fingerprint

    def path_of(self, block_hash: bytes, group: int) -> str:
        """Where a block's file lies in the folder."""
        name = blake2b(block_hash + self._fingerprint, key=self._key, digest_size=DIGEST_SIZE).hexdigest()
        return f"{self._fingerprint.hex()}/{name[:2]}/{name}.{group}"
