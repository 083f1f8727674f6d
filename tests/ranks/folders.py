"""Support for tests of ranks, which load their model from a folder, each in its own process."""

from pathlib import Path

import pytest

from tests import zoo


def folder_of(name: str, factory: pytest.TempPathFactory) -> str:
    """A model of the zoo in a folder, made once in each session."""
    folder = factory.getbasetemp() / f"ranks-{name}"
    if not folder.exists():
        zoo.build(name).save_pretrained(folder)
    return str(folder)


def children(pid: int) -> list[int]:
    """The processes that a process has started, in the order of their start."""
    found = [int(each) for file in Path(f"/proc/{pid}/task").glob("*/children") for each in file.read_text().split()]
    return sorted(found)
