"""The documents, and what is in them: blocks of code, code in the text, links and headings."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

_FENCE = re.compile(r"^ *(?P<marks>`{3,}|~{3,}) *(?P<language>\w*)")


class Block(NamedTuple):
    """A block of code."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """The blocks in one of these languages, of all documents."""
    return [block for path in DOCUMENTS for block in _blocks(path) if block.language in languages]


def _blocks(path: Path) -> Iterator[Block]:
    marks, start, language, lines = "", 0, "", list[str]()
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        fence = _FENCE.match(line)
        if marks and line.strip() == marks:
            yield Block(path, start, language, "\n".join(lines))
            marks = ""
        elif marks:
            lines.append(line)
        elif fence is not None:
            marks, start, language, lines = fence["marks"], number, fence["language"], []
    assert not marks, f"{path}:{start}: a block of code without an end"


def prose(path: Path) -> str:
    """A document without its blocks of code."""
    kept, marks = list[str](), ""
    for line in path.read_text(encoding="utf-8").split("\n"):
        fence = _FENCE.match(line)
        if marks:
            marks = "" if line.strip() == marks else marks
        elif fence is not None:
            marks = fence["marks"]
        else:
            kept.append(line)
    return "\n".join(kept)


def code_in_text(path: Path) -> list[str]:
    """What stands between backquotes in the text."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(path))]


def links(path: Path) -> list[tuple[str, str]]:
    """Links to files of the repository: the file and the anchor, each perhaps empty."""
    text = re.sub(r"`[^`]*`", "", prose(path))
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return [(name, anchor) for name, _, anchor in (each.partition("#") for each in targets) if "://" not in name]


def anchors(path: Path) -> set[str]:
    """What a link may name in a document: its headings, as GitHub writes them."""
    found: set[str] = set()
    times: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(f"{slug}-{times[slug]}" if times[slug] else slug)
        times[slug] += 1
    return found
