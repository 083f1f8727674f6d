"""A block file is loaded only if it is complete and holds the requested block."""

import os
import random
from pathlib import Path

import pytest

from inflight.prefix_store import block_file
from inflight.scheduling.persistence import BlockContent

CONTENT = BlockContent(b"d" * 32, b"p" * 32, bytes(range(64)), 1)
SIZES = (100, 1, 4096)
NUM_MUTATIONS = 3000


def rows(fill: int | None = None) -> list[memoryview]:
    return [memoryview(bytearray(os.urandom(size) if fill is None else [fill] * size)) for size in SIZES]


def always() -> bool:
    return True


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written, read = rows(), rows(0)
    num_bytes = block_file.write(tmp_path / "block", CONTENT, written, always)
    assert num_bytes == (tmp_path / "block").stat().st_size
    assert block_file.read(tmp_path / "block", CONTENT, read) is None
    assert read == written
    assert [path.name for path in tmp_path.iterdir()] == ["block"]
    assert (tmp_path / "block").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "other",
    [
        CONTENT._replace(block_hash=b"e" * 32),
        CONTENT._replace(parent=b"q" * 32),
        CONTENT._replace(token_ids=bytes(64)),
        CONTENT._replace(group=0),
    ],
)
def test_a_file_of_something_else_is_refused(other: BlockContent, tmp_path: Path) -> None:
    block_file.write(tmp_path / "block", CONTENT, rows(), always)
    assert block_file.read(tmp_path / "block", other, rows()) == "is of something else"


def test_blocks_of_other_sizes_are_refused(tmp_path: Path) -> None:
    block_file.write(tmp_path / "block", CONTENT, rows(), always)
    assert block_file.read(tmp_path / "block", CONTENT, rows()[:2]) == "has the wrong size"


def test_no_mutation_of_a_file_is_believed(tmp_path: Path) -> None:
    rng, path = random.Random(1), tmp_path / "block"
    block_file.write(path, CONTENT, rows(), always)
    whole = path.read_bytes()
    for _ in range(NUM_MUTATIONS):
        data = bytearray(whole)
        kind = rng.randrange(4)
        place = rng.randrange(len(data))
        if kind == 0:
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            data[place:place] = rng.randbytes(rng.randint(1, 40))
        else:
            length = rng.randint(1, 200)
            data[place : place + length] = bytes(len(data[place : place + length]))
        if bytes(data) == whole:
            continue
        path.write_bytes(data)
        assert block_file.read(path, CONTENT, rows()) is not None


def test_a_block_that_has_changed_meanwhile_is_not_kept(tmp_path: Path) -> None:
    assert block_file.write(tmp_path / "block", CONTENT, rows(), lambda: False) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    released = memoryview(bytearray(10))
    broken = [*rows(), released]
    released.release()
    with pytest.raises(ValueError, match="released"):
        block_file.write(tmp_path / "block", CONTENT, broken, always)
    assert list(tmp_path.iterdir()) == []
