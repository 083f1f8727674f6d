"""Fetches the libraries of the live page from npm, at the versions below, into `server/live/static/vendor`.

    python tools/vendor_page_libraries.py

Browsers load the files as they are: only the names by which one imports another become paths. Each library's licence
comes along. Needs npm; nobody who runs or tests inflight needs this.
"""

import subprocess
import tarfile
import tempfile
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "src/inflight/server/live/static/vendor"

LIBRARIES = {
    "preact": ("11.2.0", {"dist/preact.mjs": "preact.js", "hooks/dist/hooks.mjs": "hooks.js"}),
    "htm": ("3.1.1", {"dist/htm.mjs": "htm.js"}),
    "uplot": ("1.6.32", {"dist/uPlot.esm.js": "uplot.js", "dist/uPlot.min.css": "uplot.css"}),
    "eventsource-parser": ("3.1.1", {"dist/index.js": "eventsource-parser.js"}),
}
"""For each package its version, and which of its files are taken under which names."""

PATHS = {'from"preact"': 'from"./preact.js"'}


def main() -> None:
    VENDOR.mkdir(parents=True, exist_ok=True)
    for name, (version, files) in LIBRARIES.items():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["npm", "pack", "--silent", f"{name}@{version}"], cwd=folder, check=True)
            with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
                for source, target in {**files, "LICENSE": f"{name}.LICENSE"}.items():
                    member = archive.extractfile(f"package/{source}")
                    assert member is not None, f"{name} has no {source}"
                    (VENDOR / target).write_text(_for_browsers(member.read().decode()), encoding="utf-8")
    lines = [f"{name} {version}: {', '.join(files.values())}\n" for name, (version, files) in LIBRARIES.items()]
    (VENDOR / "VERSIONS").write_text("".join(sorted(lines)), encoding="utf-8")


def _for_browsers(text: str) -> str:
    """The text with paths instead of names of packages, and without the names of source maps."""
    for name, path in PATHS.items():
        text = text.replace(name, path)
    return "".join(f"{line}\n" for line in text.splitlines() if not line.startswith("//# sourceMappingURL"))


if __name__ == "__main__":
    main()
