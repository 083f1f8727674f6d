"""Writes figures without global state, and self-contained HTML pages. `matplotlib` is an extra, imported only for
figures."""

import re
import warnings
from collections.abc import Sequence
from html import escape
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; }
body { margin: 2rem auto; padding: 0 1rem; max-width: max-content;
       font: 16px/1.5 system-ui, sans-serif; color: #1f2328; background: #ffffff; }
h1 { font-size: 1.3rem; font-weight: 600; }
pre { font: 13px/1.3 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-x: auto; }
svg { max-width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117; } svg { background: #ffffff; } }
"""


def check_pictures() -> None:
    """Raise `ValueError` unless figures can be drawn; call it before long work."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        message = "pictures need matplotlib: pip install matplotlib, or install inflight with '[pictures]'"
        raise ValueError(message) from None


def new_figure(width_inches: float, height_inches: float) -> "Figure":
    """Return an empty figure without global state (no `pyplot`).

    Raises:
        ValueError: `matplotlib` is not installed.
    """
    check_pictures()
    from matplotlib.figure import Figure

    return Figure(figsize=(width_inches, height_inches), layout="constrained")


def save_png(figure: "Figure", path: Path) -> None:
    """Write a figure as a PNG file. Raises `ValueError` if it cannot be written."""
    write_file(path, _drawn(figure, format="png", dpi=150))


def to_svg(figure: "Figure") -> str:
    """Return a figure as an `<svg>` element for HTML (no namespaces); letters are paths, so it needs no font."""
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    text = _drawn(figure, format="svg", metadata=no_metadata).decode()
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", text[text.index("<svg") :], count=2)


def to_html(drawing: RenderableType, width: int) -> str:
    """Return what `rich` would print on a terminal of `width` columns, as a `<pre>` element."""
    console = Console(record=True, file=StringIO(), width=width)
    console.print(drawing)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def write_html(path: Path, title: str, bodies: Sequence[str]) -> None:
    """Write a self-contained page: `title` (plain text) as its heading, then `bodies` (HTML) in order.

    Raises `ValueError` if it cannot be written.
    """
    body = "\n".join(bodies)
    page = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )
    write_file(path, page.encode())


def _drawn(figure: "Figure", **options: Any) -> bytes:
    drawn = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box is drawn instead
        figure.savefig(drawn, **options)
    return drawn.getvalue()


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file. Raises `ValueError` if it cannot be written."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ValueError(f"the file {str(path)!r} cannot be written: {error.strerror}") from error
