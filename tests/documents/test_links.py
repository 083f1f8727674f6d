"""Links between documents lead somewhere in a clone, where they are read as files."""

import re
from pathlib import Path

import pytest

from tests.documents.pages import DOCUMENTS, ROOT, anchors, links


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for name, anchor in links(path):
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{name} does not exist"
        assert target.is_relative_to(ROOT), f"{name} is outside of the repository"
        if anchor and not anchor.startswith("inflight."):  # these are made of docstrings, in the site
            assert anchor in anchors(target), f"{name or path.name} has no heading #{anchor}"


def test_headings_are_named_as_on_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`, c's (d)\n\n```sh\n# no heading\n```\n\n## Twice\n\n## Twice\n\n[x](y.md#z) `[n](o.md)`\n")
    assert anchors(page) == {"a-b-cs-d", "twice", "twice-1"}
    assert links(page) == [("y.md", "z")]


def test_the_readme_says_how_long_the_walk_is_as_the_walk_does() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    walk = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    pattern = r"([\d,]+) lines of code in (\d+) files"
    (said,), (exact,) = re.findall(pattern, readme), re.findall(pattern, walk)
    assert said[1] == exact[1]
    lines, exact_lines = (int(each[0].replace(",", "")) for each in (said, exact))
    assert lines == pytest.approx(exact_lines, rel=0.03)


def test_all_results_of_benchmarks_are_listed_with_a_date() -> None:
    rows = [row for row in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").split("\n") if "](" in row]
    listed = {
        name: re.findall(r"\d{4}-\d\d-\d\d", row) for row in rows for name in re.findall(r"results/([^)]+\.md)", row)
    }
    folder = ROOT / "benchmarks" / "results"
    assert set(listed) == {str(path.relative_to(folder)) for path in folder.rglob("*.md")}
    for name, dates in listed.items():
        assert len(dates) == 1, name
        said = re.findall(r"\b20\d\d-\d\d-\d\d\b", (folder / name).read_text(encoding="utf-8"))
        assert not said or dates[0] in said, name


@pytest.mark.parametrize("page", ["architecture.md", "glossary.md", "reading.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    package = ROOT / "src" / "inflight"
    homes = (package, package / "execution", package / "server", ROOT)
    named = re.findall(r"`([a-z_]+/[\w/]*(?:\.\w+|/))`", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert named
    assert [each for each in named if not any((home / each).exists() for home in homes)] == []
