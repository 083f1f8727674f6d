"""Takes the picture of the live page in `docs/live-page.md`: of the demo, in a headless Chromium.

    python -m tools.picture_of_page                     # docs/assets/live-page.png

Needs Playwright and a Chromium (`make test-browser` installs them).
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "assets" / "live-page.png"
SIZE = {"width": 1240, "height": 720}
FILLED = "() => [...document.querySelectorAll('.lane .words')].some((each) => parseInt(each.textContent.slice(6)) > 60)"
"""Whether a lane has some tokens."""


def main() -> None:
    """Take the picture."""
    parser = argparse.ArgumentParser(description="Take the picture of the live page.")
    parser.add_argument("path", nargs="?", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "inflight", "demo", "--web", "--no-browser", "--slots", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as demo:
        assert demo.stdout is not None
        match = next(filter(None, (re.search(r"watch it at (\S+);", line) for line in demo.stdout)))
        try:
            _take(match[1], arguments.path)
        finally:
            demo.terminate()


def _take(url: str, path: Path) -> None:
    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        page = browser.new_page(viewport=SIZE, color_scheme="light")  # type: ignore[arg-type]
        page.goto(url)
        page.wait_for_function(FILLED)
        page.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    main()
