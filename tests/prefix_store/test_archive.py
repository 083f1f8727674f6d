"""Exported and imported prefixes are unchanged."""

import io
import random
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inflight import LLM
from inflight.prefix_store.archive import ArchiveTotals, read_archive, write_archive
from inflight.prefix_store.block_folder import is_pinned
from inflight.prefix_store.inspection import stored_fingerprints
from tests import zoo
from tests.prefix_store.test_restored_prefixes import PROMPTS, restored, run, salted
from tests.speculation.random_requests import said

MAX_BYTES = 10**8


def moved(source: Path, target: Path, *, only_pinned: bool = False) -> ArchiveTotals:
    file = io.BytesIO()
    written = write_archive(source, stored_fingerprints(source), file, only_pinned=only_pinned)
    file.seek(0)
    assert read_archive(file, target, MAX_BYTES) == replace(written, num_damaged=0)
    return written


def archive_of(folder: Path) -> bytes:
    file = io.BytesIO()
    write_archive(folder, stored_fingerprints(folder), file)
    return file.getvalue()


def num_files(folder: Path) -> int:
    return sum(each.num_blocks for each in stored_fingerprints(folder))


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3_longrope"])
@pytest.mark.thorough("llama")
def test_another_folder_restores_what_one_computed(name: str, tmp_path: Path) -> None:
    model, options = zoo.build(name), {"block_size": 4}
    here, there = tmp_path / "here", tmp_path / "there"
    expected = run(LLM(model, **options, prefix_cache_dir=here))
    run(LLM(model, **options, prefix_cache_dir=there), PROMPTS[:1])  # a part of it is there already, under other names
    assert moved(here, there).num_blocks == num_files(here) == num_files(there)
    for _ in range(2):
        llm = LLM(model, **options, prefix_cache_dir=there)
        for output, wanted in zip(run(llm), expected, strict=True):
            assert said(output) == said(wanted)
        assert restored(llm) >= 64
    names = [{path.name for path in folder.glob("*/??/*")} for folder in (here, there)]
    assert not names[0] & names[1]
    moved(there, here)  # nothing that is not there
    assert {path.name for path in here.glob("*/??/*")} == names[0]


def test_an_archive_is_a_folder_of_its_own(tmp_path: Path) -> None:
    model = zoo.build("llama")
    run(LLM(model, block_size=4, prefix_cache_dir=tmp_path / "here"))
    with tarfile.open(fileobj=io.BytesIO(archive_of(tmp_path / "here"))) as archive:
        archive.extractall(tmp_path / "there", filter="data")
    llm = LLM(model, block_size=4, prefix_cache_dir=tmp_path / "there")
    run(llm)
    assert restored(llm) >= 64


def test_what_is_salted_stays(tmp_path: Path) -> None:
    model, here, there = zoo.build("llama"), tmp_path / "here", tmp_path / "there"
    options: dict[str, Any] = {"block_size": 4}
    run(LLM(model, **options, prefix_cache_dir=here), salted("secret"))
    assert num_files(here) > 0
    assert moved(here, there) == ArchiveTotals()


def test_only_what_is_pinned(tmp_path: Path) -> None:
    model, here, there = zoo.build("llama"), tmp_path / "here", tmp_path / "there"
    llm = LLM(model, block_size=4, prefix_cache_dir=here)
    run(llm)
    assert llm.cache_prefix({"prompt_token_ids": PROMPTS[0]["prompt_token_ids"][:50]}) == 48
    assert moved(here, there, only_pinned=True).num_blocks == num_files(there) == 12
    (holding,) = stored_fingerprints(there)
    assert holding.num_pinned_bytes == holding.num_bytes
    assert all(is_pinned(path.stat()) for path in holding.files())
    assert holding.about == stored_fingerprints(here)[0].about


def test_damaged_blocks_are_left_out(tmp_path: Path) -> None:
    model, here, there = zoo.build("llama"), tmp_path / "here", tmp_path / "there"
    expected = run(LLM(model, block_size=4, prefix_cache_dir=here))
    (holding,) = stored_fingerprints(here)
    chosen = random.Random(1).sample(holding.files(), 4)
    for path in chosen:
        data = bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)
    (here / holding.fingerprint / "ab").mkdir(exist_ok=True)
    (here / holding.fingerprint / "ab" / "something else").write_text("not ours")
    (here / "notes").mkdir()
    written = moved(here, there)
    assert written.num_damaged == 4
    assert written.num_blocks < len(holding.files()) - 4
    for output, wanted in zip(run(LLM(model, block_size=4, prefix_cache_dir=there)), expected, strict=True):
        assert said(output) == said(wanted)


@pytest.mark.thorough
def test_a_damaged_archive_gives_no_wrong_token(tmp_path: Path) -> None:
    model, rng = zoo.build("llama"), random.Random(1)
    expected = run(LLM(model, block_size=4, prefix_cache_dir=tmp_path / "here"))
    whole = archive_of(tmp_path / "here")
    num_refused = 0
    for number in range(100):
        data, there = bytearray(whole), tmp_path / str(number)
        place = rng.randrange(len(data))
        if number % 2:
            del data[place:]
        else:
            data[place] ^= 1 << rng.randrange(8)
        try:
            read_archive(io.BytesIO(data), there, MAX_BYTES)
        except ValueError:
            num_refused += 1
        if number % 10 < 2:
            llm = LLM(model, block_size=4, prefix_cache_dir=there)
            for output, wanted in zip(run(llm), expected, strict=True):
                assert said(output) == said(wanted)
    assert num_refused >= 25  # a cut may take only zeros at the end, and a damaged block is merely left out


@pytest.mark.parametrize(
    "member",
    ["../key", "/etc/passwd", f"{'0' * 64}/../{'1' * 64}.0", f"{'0' * 64}/11/{'1' * 64}.0/../x", f"{'0' * 64}/hits"],
)
def test_hostile_names_are_refused(member: str, tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in (("key", bytes(32)), (member, b"data")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    file.seek(0)
    with pytest.raises(ValueError, match="which is no block"):
        read_archive(file, tmp_path / "there", MAX_BYTES)
    assert list(tmp_path.iterdir()) == []


def test_links_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no archive of prefixes"):
        read_archive(io.BytesIO(b"GGUF" * 1000), tmp_path, MAX_BYTES)
    with pytest.raises(ValueError, match=r"no archive of prefixes|begin with a key"):
        read_archive(io.BytesIO(), tmp_path, MAX_BYTES)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        link = tarfile.TarInfo("key")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    file.seek(0)
    with pytest.raises(ValueError, match="no archive of prefixes"):
        read_archive(file, tmp_path, MAX_BYTES)
