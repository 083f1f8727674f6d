"""`make docs` builds a site whose links and anchors lead somewhere, and which needs no other host."""

import json
import logging
import os
import re
from pathlib import Path

import click
import pytest
import yaml

pytest.importorskip("mkdocs")
os.environ["NO_MKDOCS_2_WARNING"] = "1"  # mkdocs-material prints news of its own

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import inflight
from inflight.cli import app
from tests.documents.pages import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, built as strictly as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    config.plugins.on_shutdown()
    return folder


@pytest.mark.thorough
def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?([^\"' >]+)", text)
        loaded += re.findall(r"<link\b[^>]*\bhref=[\"']?([^\"' >]+)", text)
        assert loaded
        assert not [each for each in loaded if re.match(r"(https?:)?//", each)], page.name


@pytest.mark.thorough
def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for name in set(inflight.__all__) - {"__version__"}:
        assert f'id="{getattr(inflight, name).__module__}.{name}"' in text, name


@pytest.mark.thorough
def test_every_command_is_in_the_reference(site: Path) -> None:
    text = (site / "reference" / "command-line.html").read_text(encoding="utf-8")
    groups = {name: command for name, command in app.commands.items() if isinstance(command, click.Group)}
    names = app.commands.keys() - groups.keys() | {
        f"{name} {each}" for name in groups for each in groups[name].commands
    }
    for name in names:
        assert f'id="inflight-{name.replace(" ", "-")}"' in text, name
    assert "Cache:\n" in text
    assert "--max-num-batched-tokens" in text
    assert "--background-tokens-per-step" in text, "which only --help-all shows"


@pytest.mark.thorough
def test_pages_can_be_searched_and_files_of_the_repository_be_read(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {document["location"].partition("#")[0] for document in index["docs"] if "preempt" in document["text"]}
    assert {"how-it-works.html", "glossary.html", "guides/memory.html"} <= found
    assert not [document for document in index["docs"] if document["location"].startswith("files/src")]
    shown = (site / "files" / "examples" / "agent.py.html").read_text(encoding="utf-8")
    assert "An agent: the model calls tools" in shown
    assert 'src="data:image/png;base64,' in (site / "files/examples/continuous_batching.ipynb.html").read_text()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[x](nowhere.md)", "nowhere.md"),
        ("[x](index.md#nothing)", "nothing"),
        ("[x](../nothing.py)", "nothing.py"),
        ("[x](/index.md)", "absolute"),
    ],
)
def test_a_link_that_leads_nowhere_is_an_error(
    text: str, complaint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n{text}\n")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    validation = yaml.safe_load(re.findall(r"^validation:\n(?:[ ].*\n)+", settings, re.MULTILINE)[0])
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump({"site_name": "x", "plugins": [], **validation}))
    with caplog.at_level(logging.WARNING), pytest.raises(Abort):
        build(load_config(str(tmp_path / "mkdocs.yml"), strict=True))
    assert complaint in caplog.text
