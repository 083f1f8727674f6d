"""Commands keep prefixes in a folder."""

import os
import subprocess
import sys
from pathlib import Path

TEXT = "Tom had a red ball. He liked to play with it in the park. " * 8


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
