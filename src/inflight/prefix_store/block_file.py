"""A block of the cache as a file: its header, its bytes, and a checksum over both.

The reader knows the whole header, so a file is valid only if it begins with exactly that. A file is written under
another name and renamed when complete; it is not synced, because a lost block is recomputed.
"""

import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import xxhash

from inflight.contracts.step.block_hash import block_hash
from inflight.scheduling.persistence import BlockContent

MAGIC = b"inflight block 2"
HEADER = struct.Struct("<16s32s32sIIQ")
"""Magic, block hash, parent, group, bytes of tokens, bytes of the block; then the tokens, the block, the checksum."""
CHECKSUM_SIZE = 16
PARTIAL = ".partial"

Rows = Sequence[memoryview]
"""A block's bytes, in pieces."""

_numbers = count()


def size_of(content: BlockContent, num_bytes: int) -> int:
    """The size of the file for a block of this many bytes."""
    return HEADER.size + len(content.token_ids) + num_bytes + CHECKSUM_SIZE


def write(path: Path, content: BlockContent, rows: Rows, is_current: Callable[[], bool]) -> int:
    """Write a block, if it did not change meanwhile. Returns the file's bytes; 0: none was written.

    Raises `OSError`.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.{next(_numbers)}{PARTIAL}")
    header = _header(content, rows)
    checksum = xxhash.xxh3_128(header)
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
            _write_all(file.write, header)
            for row in rows:
                checksum.update(row)
                _write_all(file.write, row)
            _write_all(file.write, checksum.digest())
        if is_current():
            os.replace(partial, path)
            return size_of(content, sum(map(len, rows)))
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.unlink(missing_ok=True)
    return 0


def announce(path: Path) -> None:
    """Advise the system of a coming read, where supported: a disk needs several concurrent reads."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def read(path: Path, content: BlockContent, rows: Rows) -> str | None:
    """Read a block into `rows`. Returns why it failed, in words after the file's name; None: success. After a failure
    `rows` is undefined.

    Raises `OSError` if the file cannot be read.
    """
    header = _header(content, rows)
    with open(path, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size != size_of(content, sum(map(len, rows))):
            return "has the wrong size"
        if _read_all(file.readinto, memoryview(bytearray(len(header)))) != header:
            return "is of something else"
        checksum = xxhash.xxh3_128(header)
        for row in rows:
            checksum.update(_read_all(file.readinto, row))
        if _read_all(file.readinto, memoryview(bytearray(CHECKSUM_SIZE))) != checksum.digest():
            return "is damaged"
    return None


def parse(data: bytes) -> tuple[BlockContent, memoryview]:
    """What a file holds, and the block's bytes.

    Raises:
        ValueError: why it cannot be any block, in words that follow the file's name.
    """
    if len(data) < HEADER.size + CHECKSUM_SIZE:
        raise ValueError("has the wrong size")
    magic, number, parent, group, num_token_bytes, num_bytes = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ValueError("is of something else")
    start = HEADER.size + num_token_bytes
    if len(data) != start + num_bytes + CHECKSUM_SIZE:
        raise ValueError("has the wrong size")
    whole = memoryview(data)
    if xxhash.xxh3_128_digest(whole[:-CHECKSUM_SIZE]) != data[-CHECKSUM_SIZE:]:
        raise ValueError("is damaged")
    token_ids = data[HEADER.size : start]
    if number != block_hash(parent, token_ids):
        raise ValueError("is of something else")
    return BlockContent(number, parent, token_ids, group), whole[start:-CHECKSUM_SIZE]


def hashes_in(path: Path) -> tuple[bytes, bytes]:
    """The hash of the block that a file says it holds, and of the one before it. Raises `OSError`."""
    with open(path, "rb", buffering=0) as file:
        header = file.read(HEADER.size).ljust(HEADER.size)
    return HEADER.unpack(header)[1:3]


def _header(content: BlockContent, rows: Rows) -> bytes:
    number, parent, token_ids, group = content
    return HEADER.pack(MAGIC, number, parent, group, len(token_ids), sum(map(len, rows))) + token_ids


def _write_all(write_some: Callable[[memoryview], int | None], data: "bytes | memoryview") -> None:
    left = memoryview(data)
    while left:
        left = left[write_some(left) or 0 :]


def _read_all(read_some: Callable[[memoryview], int | None], into: memoryview) -> memoryview:
    """Read the file into `into`, up to its end, and return it."""
    left = into
    while left:
        num_read = read_some(left)
        if not num_read:
            break  # the file was cut meanwhile: the checksum shows it
        left = left[num_read:]
    return into
