"""Which paths are whose: those of operators, and those of the live page. Knows no application."""

from starlette.types import Scope

HEALTH_PATH = "/health"

OPERATOR_PATHS = frozenset({HEALTH_PATH, "/metrics", "/version"})
"""For probes and scrapers: they need no key, have no limits, and are logged at debug level only."""

PAGE_PATHS = frozenset({"/", "/docs"})
PAGE_FILES = "/ui/"
"""The live page itself: files of this package, the same for everybody."""

LIVE_PATHS = "/live/"
"""What the live page shows: it needs a key like any request, and is neither limited nor logged, as it asks often."""


def path_of(scope: Scope) -> str:
    """The path as the application routes it: without the prefix of a proxy in front of the server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def needs_no_key(path: str) -> bool:
    """Whether everybody may have what is there."""
    return path in OPERATOR_PATHS or path in PAGE_PATHS or path.startswith(PAGE_FILES)


def is_work(path: str) -> bool:
    """Whether a request to this path is one of those that the server is there for: limited, and logged."""
    return not needs_no_key(path) and not path.startswith(LIVE_PATHS)
