"""A server, and pages of a headless Chromium that may say nothing on their consoles."""

import os
import shutil
from collections.abc import Iterator

import pytest

from inflight import AsyncLLM
from tests.server.serving import RunningServer

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make test-browser")

QUIET = [  # the browser connects only to the server
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
]
MOST_MILLISECONDS = 60_000
"""That anything is waited for."""

sync_api.expect.set_options(timeout=MOST_MILLISECONDS)


def executable() -> str | None:
    """A Chromium of the system; None: Playwright's own."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(AsyncLLM(max_num_seqs=4, restart_delays=(0.0, 0.0))) as running:
        assert running.http.get("/v1/models").status_code == 200
        yield running


@pytest.fixture(scope="module")  # while Playwright runs, no other event loop can, and the next tests need some
def browser() -> "Iterator[sync_api.Browser]":
    options = [*QUIET, *(["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else [])]
    with sync_api.sync_playwright() as playwright:
        try:
            launched = playwright.chromium.launch(executable_path=executable(), args=options)
        except sync_api.Error as error:
            pytest.skip(f"no Chromium can be started: make test-browser ({str(error).splitlines()[0]})")
        yield launched
        launched.close()


class Page:
    """A page, and what went wrong on it.

    Attributes:
        page: Playwright's.
        complaints: messages of the console, errors of scripts, and requests that failed.
    """

    def __init__(self, page: "sync_api.Page") -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("requestfailed", self._observe_failure)
        page.set_default_timeout(MOST_MILLISECONDS)

    def _observe_failure(self, request: "sync_api.Request") -> None:
        if request.failure != "net::ERR_ABORTED":  # as the page does when it is told to stop, or is left
            self.complaints.append(f"failed: {request.url} {request.failure}")

    def open(self, url: str) -> None:
        """Go there, and wait until the stream is open."""
        self.page.goto(url)
        self.page.wait_for_selector(".status.open")


@pytest.fixture
def opened(browser: "sync_api.Browser") -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = Page(context.new_page())
    yield page
    context.close()
    assert not page.complaints
