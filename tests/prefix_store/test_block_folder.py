"""A folder of blocks: opaque names, a size limit, several engines."""

import os
import threading
from array import array
from pathlib import Path

import pytest

from inflight.contracts.step.block_hash import Root, block_hash, block_hashes
from inflight.prefix_store import BlockFolder

ONE, OTHER = b"1" * 32, b"2" * 32


def put(folder: BlockFolder, digest: bytes, size: int = 100, age: float = 0.0) -> Path:
    path = folder.path_of(digest, 0)
    folder.make_place(path)
    path.write_bytes(bytes(size))
    os.utime(path, (path.stat().st_mtime - age,) * 2)
    folder.observe_written(size)
    return path


def test_names_depend_on_everything(tmp_path: Path) -> None:
    roots = [Root(), Root(""), Root("salt"), Root(is_long=True), Root(adapter="salt")]
    first = block_hash(roots[0].block_hash, b"tokens")
    hashes = [root.block_hash for root in roots] + [first, block_hash(first, b"tokens"), block_hash(first, b"token")]
    folders = [
        BlockFolder(tmp_path, ONE, 1000),
        BlockFolder(tmp_path, OTHER, 1000),
        BlockFolder(tmp_path / "another key", ONE, 1000),
    ]
    paths = {folder.path_of(each, group) for folder in folders for each in hashes for group in (0, 1)}
    names = {path.stem for path in paths}
    assert len(names) == len(hashes) * 3
    assert len(paths) == len(hashes) * 6
    assert BlockFolder(tmp_path, ONE, 1000).path_of(first, 0) == folders[0].path_of(first, 0)


def test_block_hashes_are_those_of_a_chain_and_differ_with_every_token() -> None:
    token_ids, root = list(range(40)), Root("salt")
    hashes = list(block_hashes(token_ids, 16, root))
    chained = root.block_hash
    for number in range(2):
        chained = block_hash(chained, array("i", token_ids[number * 16 : number * 16 + 16]).tobytes())
        assert hashes[number] == chained
    assert len(hashes) == 2
    changed = list(block_hashes([1, *token_ids[1:]], 16, root))
    assert not set(hashes) & {*changed, *block_hashes(token_ids, 16, Root())}


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path / "cache", ONE, 1000)
    place = put(folder, ONE).parent
    for path in (tmp_path / "cache", place, place.parent):
        assert path.stat().st_mode & 0o077 == 0
    assert (tmp_path / "cache" / "key").stat().st_mode & 0o777 == 0o600


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, ONE, 1000)
    paths = [put(folder, bytes([number]) * 32, age=100.0 - number) for number in range(10)]
    assert all(path.exists() for path in paths)
    folder.observe_use(paths[0])
    put(folder, ONE)
    left = [path.exists() for path in paths]
    assert left[0]
    assert left == [True, False, False, *[True] * 7]
    for number in range(100):
        put(folder, bytes([100 + number]) * 32)
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*/*")) <= 1000


def test_what_others_write_counts(tmp_path: Path) -> None:
    one, other = BlockFolder(tmp_path, ONE, 1000), BlockFolder(tmp_path, OTHER, 1000)
    for number in range(40):
        put(one if number % 2 else other, bytes([number]) * 32)
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*/*")) <= 1100


def test_what_was_never_finished_is_deleted_when_it_is_old(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, ONE, 1000)
    path = put(folder, ONE)
    old, new = path.with_name("a.partial"), path.with_name("b.partial")
    for each in (old, new):
        each.write_bytes(b"x")
    os.utime(old, (0, 0))
    put(BlockFolder(tmp_path, ONE, 1000), OTHER)
    assert [old.exists(), new.exists()] == [False, True]


def test_engines_that_begin_at_once_have_one_key(tmp_path: Path) -> None:
    paths: set[Path] = set()
    barrier = threading.Barrier(8)

    def open_it() -> None:
        barrier.wait()
        paths.add(BlockFolder(tmp_path, ONE, 1000).path_of(OTHER, 0))

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_a_damaged_key_is_replaced(tmp_path: Path) -> None:
    before = BlockFolder(tmp_path, ONE, 1000).path_of(OTHER, 0)
    (tmp_path / "key").write_bytes(b"short")
    assert BlockFolder(tmp_path, ONE, 1000).path_of(OTHER, 0) != before


def test_what_is_pinned_stays(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, ONE, 1000)
    pinned = [put(folder, bytes([number]) * 32, age=1000.0) for number in range(4)]
    folder.pin([*pinned, tmp_path / "deleted meanwhile"])
    for number in range(100):
        put(folder, bytes([100 + number]) * 32)
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*/*")) <= 1000
    assert all(path.exists() for path in pinned)
    folder.observe_use(pinned[0])
    folder.pin(pinned)  # again
    with pytest.raises(ValueError, match=r"200 bytes cannot be pinned .* 400 are already, and 500 may be"):
        folder.pin(sorted(set(tmp_path.glob("*/*/*")) - set(pinned))[:2])


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, ONE, 1000)
    path = put(folder, ONE, age=100.0)
    path.unlink()
    path.mkdir()
    path.with_name("link").symlink_to(tmp_path / "nowhere")
    for number in range(20):
        put(folder, bytes([number]) * 32)
    assert path.is_dir()
    assert sum(each.stat().st_size for each in tmp_path.glob("*/*/*") if each.is_file()) <= 1000
