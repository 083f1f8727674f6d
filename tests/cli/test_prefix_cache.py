"""Commands keep prefixes in a folder."""

import os
from pathlib import Path

from tests.command import Command

TEXT = "Tom had a red ball. He liked to play with it in the park. " * 8


def test_a_command_saves_what_it_has_before_it_ends(command: Command, tmp_path: Path) -> None:
    options = ("-q", TEXT, "--temperature", 0, "--max-tokens", 5, "--prefix-cache-dir", tmp_path / "cache")
    first = command("generate", *options)
    assert (first.returncode, first.stderr) == (0, "")
    num_files = sum(len(files) for _, _, files in os.walk(tmp_path / "cache"))
    assert num_files > 8
    assert command("generate", *options).stdout == first.stdout
