"""What `mkdocs.yml` needs beyond plugins: pages of the site that are files elsewhere in the repository.

The front page is `README.md`; `CHANGELOG.md`, `CONTRIBUTING.md` and `SECURITY.md` are pages, too. Documents link to
other files of the repository as they do in a clone (`../examples/deploy/Dockerfile`). Each such file becomes a page
that shows it, and each folder a page that lists it. A link to a file that does not exist stays as it is, so that a
strict build refuses it. The page of the command line gets the help of all commands, and each figure says from which
commit it comes.
"""

import json
import posixpath
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from inflight.cli import app
from inflight.cli.help import SHOWS_ALL

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files beside `docs/`, and where they are in the site."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".service": "ini", ".json": "json", ".toml": "toml"}
IMAGES = (".png", ".svg")
HIDDEN = ("__pycache__",)
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
"""At the top of a page that the search leaves out."""

COMMANDS = "[commands]: #"
"""Begins the line in whose place the help of all commands stands."""
HELP_WIDTH = 100

_DRAWN = re.compile(r"!\[[^\]]*\]\([\w./-]*figures/(?P<name>[\w-]+\.png)\)")
_LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#:]+)(?=[)#])")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_FENCE = re.compile(r"^ *(```|~~~)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in `docs/`: those that have a name, and all that are linked to."""
    sources = {f"docs/{file.src_uri}": file.src_uri for file in files.documentation_pages()}
    waiting = [*sources, *PAGES]
    known = set(waiting)
    for path in PAGES:
        files.append(File.generated(config, PAGES[path], content=(ROOT / path).read_text(encoding="utf-8")))
    while waiting:
        source = waiting.pop()
        text = _shown(source) if source not in sources else (ROOT / source).read_text(encoding="utf-8")
        for target in _linked(text, source):
            if target not in known and not _is_of_the_site(target):
                known.add(target)
                files.append(_file(target, config))
                if not target.endswith(IMAGES):
                    waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page lead to where the files are in the site."""
    source = _source(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = _repository_path(match["target"], source)
        if target is None:
            return match["target"]
        return posixpath.relpath(_site_path(target), posixpath.dirname(page.file.src_uri) or ".")

    lines = (line if in_code else _LINK.sub(moved, _DRAWN.sub(_dated, line)) for line, in_code in _lines(markdown))
    context = click.Context(app, info_name="inflight", **app.context_settings)
    context.meta[SHOWS_ALL] = True
    return "\n".join(help_of_all(app, context) if line.startswith(COMMANDS) else line for line in lines)


def _dated(match: re.Match[str]) -> str:
    """A figure with the commit from which it comes, which shows when one points to it."""
    return f'{match[0]}{{ title="{_commit(match["name"])}" }}'


@cache
def _commit(figure: str) -> str:
    """The commit that last changed a figure, and its date; empty outside of a clone."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=commit %h, %cs", "--", f"docs/figures/{figure}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def help_of_all(command: click.Command, context: click.Context) -> str:
    """A section for a command; for a group, one for each command in it, in the order of their names."""
    if not isinstance(command, click.Group):
        return f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```"
    inner = (
        help_of_all(each, click.Context(each, parent=context, info_name=name, terminal_width=HELP_WIDTH))
        for name, each in sorted(command.commands.items())
    )
    return "\n\n".join(inner)


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it is in a block of code."""
    in_code = False
    for line in text.split("\n"):
        is_fence = _FENCE.match(line) is not None
        yield line, in_code or is_fence
        in_code ^= is_fence


def _linked(text: str, source: str) -> Iterator[str]:
    """The files and folders of the repository that a file links to."""
    for line, in_code in _lines(text):
        if not in_code:
            for match in _LINK.finditer(line):
                target = _repository_path(match["target"], source)
                if target is not None:
                    yield target


def _repository_path(link: str, source: str) -> str | None:
    """Where a link of `source` leads, from the repository's root; None if nothing is there."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def _is_of_the_site(path: str) -> bool:
    """Whether `mkdocs` takes it as it is: a file in `docs/`."""
    return path.startswith("docs/") and (ROOT / path).is_file()


def _site_path(path: str) -> str:
    """Where the site has a file or folder of the repository."""
    if _is_of_the_site(path):
        return path.removeprefix("docs/")
    if path in PAGES:
        return PAGES[path]
    if (ROOT / path).is_dir():
        return f"files/{path}/index.md"
    return f"files/{path}" if path.endswith((".md", *IMAGES)) else f"files/{path}.md"


def _source(src_uri: str) -> str:
    """The file of the repository that a page shows."""
    of_pages = {page: path for path, page in PAGES.items()}
    if src_uri in of_pages:
        return of_pages[src_uri]
    if not src_uri.startswith("files/"):
        return f"docs/{src_uri}"
    path = src_uri.removeprefix("files/")
    if (ROOT / path).is_file():
        return path
    return path.removesuffix("/index.md") if path.endswith("/index.md") else path.removesuffix(".md")


def _file(path: str, config: MkDocsConfig) -> File:
    content: dict[str, Any] = {"abs_src_path": str(ROOT / path)} if path.endswith(IMAGES) else {"content": _shown(path)}
    return File.generated(config, _site_path(path), inclusion=InclusionLevel.NOT_IN_NAV, **content)


def _shown(path: str) -> str:
    """A page's text about a file or folder of the repository."""
    whole = ROOT / path
    if whole.is_dir():
        names = sorted(each.name for each in whole.iterdir() if each.name not in HIDDEN)
        return f"{UNSEARCHED}# {path}\n\n" + "\n".join(f"- [{name}]({whole.name}/{name})" for name in names)
    text = whole.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return "\n\n".join(_cell(cell) for cell in json.loads(text)["cells"])
    language = LANGUAGES.get(whole.suffix, "docker" if whole.name == "Dockerfile" else "text")
    return f"{UNSEARCHED}# {path}\n\n````{language}\n{text.rstrip()}\n````\n"


def _cell(cell: dict[str, Any]) -> str:
    """A notebook's cell with its outputs: text, and pictures."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    parts = [f"````python\n{source}\n````"]
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            picture = "".join(data["image/png"]).replace("\n", "")
            parts.append(f'<img alt="What the cell above draws" src="data:image/png;base64,{picture}">')
        else:
            text = "".join(output.get("text", data.get("text/plain", "")))
            parts.append(f"````text\n{_COLOUR.sub('', text).rstrip()}\n````")
    return "\n\n".join(parts)
