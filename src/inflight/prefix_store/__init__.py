"""A store of cache blocks in files, which outlive the process. Knows bytes and tokens, no tensor and no request.

- `PrefixStore`: saves and loads blocks beside the engine's steps; implements `scheduling.persistence.BlockStore`.
- `BlockFolder`: the files in a folder, and their eviction.
- `block_file`: a file's format and validation.
"""

from inflight.prefix_store.block_folder import BlockFolder
from inflight.prefix_store.prefix_store import PrefixStore

__all__ = ["BlockFolder", "PrefixStore"]
