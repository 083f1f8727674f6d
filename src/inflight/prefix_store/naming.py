"""`Naming`: block names in a folder, derived from tokens with the folder's secret key.

A name is a chained digest of the block's tokens. The chain begins with a digest of the fingerprint, salt and adapter,
so names cover everything that keys and values depend on.
"""

import hashlib

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

    def digest_of_root(self, cache_salt: str | None, is_long: bool, adapter: str | None = None) -> bytes:
        """See `BlockStore`."""
        salt = b"0" if cache_salt is None else b"1" + cache_salt.encode()
        return self._digest(self._fingerprint, bytes([is_long]), salt, *([] if adapter is None else [adapter.encode()]))

    def digest(self, parent: bytes, token_ids: bytes) -> bytes:
        """See `BlockStore`."""
        return self._digest(parent, token_ids)

    def path_of(self, digest: bytes, group: int) -> str:
        """A block's path in the folder."""
        name = digest.hex()
        return f"{self._fingerprint.hex()}/{name[:2]}/{name}.{group}"

    def _digest(self, *parts: bytes) -> bytes:
        state = hashlib.blake2b(key=self._key, digest_size=DIGEST_SIZE)
        for part in parts:
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return state.digest()
