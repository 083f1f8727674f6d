"""Settings for the whole suite."""

import os

# Waiting threads leave their core to the other tests. OpenMP reads this once, before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A hundred tests start processes, each of which would compile all of our files again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from inflight.engine.process import connection
from inflight.engine.ranks import group
from inflight.execution.kernels import kernels_available
from inflight.grammar import compiler
from inflight.host import python_process
from tests.preloaded import serve_preloaded

# Every run draws the same examples, regardless of machine speed and of modules that a worker imported earlier.
settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")
providers.is_local_module_file = lambda path: False

# A core may stall for seconds; tests of timeouts set their own limit.
compiler.MAX_SECONDS = 60.0

# Matplotlib searches for fonts on its first use and logs that. It must not happen in a test that checks output.
with suppress(ImportError):
    import matplotlib.font_manager  # noqa: F401

# Tests run in one process per core, so more threads per process would only compete.
torch.set_num_threads(1)

# Tests use no proof of an earlier run, and leave no corrupted proof for a later one.
os.environ["INFLIGHT_CACHE_PREPARATIONS"] = "0"

# Built here if necessary, and not during a test that checks what a command prints.
assert kernels_available()

serve_preloaded()


THOROUGH_ROOMS = {"agents", "browser", "deploy", "examples", "packaging", "real_weights", "scale"}
"""Test folders and files that --quick leaves out: wheels, Ray, browsers, containers, clients of other packages,
downloads."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out what is thorough")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --quick, leave out tests that are marked `thorough`, but for the variants that the mark names."""
    if not config.getoption("--quick"):
        return
    out = []
    for item in items:
        mark = item.get_closest_marker("thorough")
        is_thorough = mark is not None and not any(word in item.name for word in mark.args)
        if is_thorough or item.path.relative_to(Path(__file__).parent).parts[0] in THOROUGH_ROOMS:
            out.append(item)
    config.hook.pytest_deselected(items=out)
    left_out = set(map(id, out))
    items[:] = [item for item in items if id(item) not in left_out]


@pytest.fixture
def fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start real Python processes as for users: they import everything, and are children of the process that starts
    them."""
    for module in (connection, group):
        monkeypatch.setattr(module, "started", python_process.started)
