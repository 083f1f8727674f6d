"""Commands keep prefixes in a folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = "Tom had a red ball. He liked to play with it in the park. " * 8


@pytest.mark.thorough
def test_a_command_saves_what_it_has_before_it_ends(tmp_path: Path) -> None:
    options = ("-q", TEXT, "--temperature", "0", "--max-tokens", "5", "--prefix-cache-dir", str(tmp_path / "cache"))
    texts = set()
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "inflight", "generate", *options], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        texts.add(done.stdout)
        assert sum(len(files) for _, _, files in os.walk(tmp_path / "cache")) > 8
    assert len(texts) == 1


def inflight(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inflight", *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.mark.thorough
def test_a_folder_is_warmed_listed_verified_and_cleared(tmp_path: Path) -> None:
    folder, system = tmp_path / "cache", tmp_path / "system.txt"
    system.write_text(TEXT)
    warmed = inflight("cache", "warm", folder, "Once upon a time " * 10, "--file", system)
    assert (warmed.returncode, warmed.stderr) == (0, "")
    assert "tokens kept of 'Tom had a red ball." in warmed.stdout
    listed = inflight("cache", "list", folder).stdout
    assert (found := re.search(r"float32 +11 +176 +(\d+ KiB) +(\d+ KiB) +0 +\d+ seconds ago", listed)), listed
    assert found[1] == found[2]  # all of it is pinned
    assert inflight("cache", "clear", folder, "--keep-pinned").stdout.startswith("0 blocks")
    assert inflight("cache", "verify", folder).stderr.endswith("blocks, 0 damaged\n")
    (path, *others) = sorted(folder.glob("*/??/*"))
    path.write_bytes(path.read_bytes()[:-1])
    others[0].rename(others[0].with_name(others[1].name[:-3] + "x.0"))
    found = inflight("cache", "verify", folder)
    assert found.returncode == 1
    assert f"{path} has the wrong size" in found.stdout
    assert "is of something else" in found.stdout
    assert inflight("cache", "verify", folder, "--delete").returncode == 0
    assert inflight("cache", "verify", folder).stderr.endswith("blocks, 0 damaged\n")
    assert inflight("cache", "clear", folder, "--unused-days", 1).stdout.startswith("0 blocks")
    assert inflight("cache", "clear", folder, "--fingerprint", "x").stdout.startswith("0 blocks")
    assert not inflight("cache", "clear", folder).stdout.startswith("0 blocks")
    assert list(folder.glob("*/??/*")) == []
    wrong = inflight("cache", "list", tmp_path)
    assert (wrong.returncode, wrong.stderr) == (2, f"inflight: '{tmp_path}' is no folder of prefixes\n")


@pytest.mark.thorough
def test_a_prefix_that_one_folder_keeps_is_found_in_another(tmp_path: Path) -> None:
    here, there, archive = tmp_path / "here", tmp_path / "there", tmp_path / "story.prefixes"
    assert inflight("cache", "warm", here, TEXT).returncode == 0
    exported = inflight("cache", "export", here, archive, "--pinned")
    assert (exported.returncode, exported.stderr) == (0, "")
    assert re.match(r"\d+ blocks exported, \d+ KiB\n", exported.stdout)
    assert archive.stat().st_mode & 0o777 == 0o600
    assert inflight("cache", "import", there, archive).stdout == exported.stdout.replace("exported", "imported")
    generated = inflight("generate", TEXT, "--max-tokens", 5, "--prefix-cache-dir", there, "-q")
    assert (generated.returncode, generated.stderr) == (0, "")
    assert re.search(r" 1 +\d+ seconds ago", inflight("cache", "list", there).stdout)  # one hit
    for arguments, said in (
        (("import", there, tmp_path / "nothing"), "there is no file"),
        (("import", there, archive, "--prefix-cache-size", "1K"), "larger than --prefix-cache-size"),
        (("import", there, here / "key"), "no archive of prefixes"),
        (("export", tmp_path / "nothing", archive), "is no folder of prefixes"),
        (("export", here, tmp_path / "nothing" / "archive"), "cannot be written"),
        (("import", here / "key", archive), "cannot be added to"),
    ):
        wrong = inflight("cache", *arguments)
        assert wrong.returncode in (1, 2)
        assert said in wrong.stderr
        assert wrong.stderr.count("\n") == 1
