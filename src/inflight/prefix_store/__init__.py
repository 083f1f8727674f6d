"""Blocks of the cache in files: prefixes that outlive the process. Knows bytes and tokens, no tensor and no request.

- `PrefixStore`: saves and loads blocks beside the engine's steps. It fills what `contracts/block_store.py` asks for.
- `BlockFolder`: where a block's file lies, how many there are, and which are deleted first.
- `block_file`: what is in it, and how it is found out that it is not what was asked for.
"""

from inflight.prefix_store.block_folder import BlockFolder
from inflight.prefix_store.prefix_store import PrefixStore

__all__ = ["BlockFolder", "PrefixStore"]
