"""The built package, and fresh environments with its declared dependencies only. `declared` links the dependencies from
the environment that runs the tests, in a second and without a network: a package is visible only if the wheel requires
it, directly or indirectly. `registry` is a user's installation: uv resolves everything from package indexes, with pip's
settings (`make package-test`). `oldest` installs the lowest declared version of each requirement.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
UV_NAMES = {"PIP_FIND_LINKS": "UV_FIND_LINKS", "PIP_EXTRA_INDEX_URL": "UV_EXTRA_INDEX_URL", "PIP_CERT": "SSL_CERT_FILE"}
"""What uv calls settings of pip."""

needs_registry = pytest.mark.skipif(
    "INFLIGHT_TEST_REGISTRY" not in os.environ, reason="installs from package indexes: see `make package-test`"
)


def build(source: Path, kind: str, to: Path) -> Path:
    """Builds "--wheel" or "--sdist" into a new folder."""
    command = [sys.executable, "-m", "build", "--no-isolation", kind, "--outdir", str(to), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = to.iterdir()
    return archive


def uv(*arguments: str | Path) -> str:
    """Runs uv, and returns what it prints."""
    of_pip = {theirs: os.environ[name] for name, theirs in UV_NAMES.items() if name in os.environ}
    environment = os.environ | of_pip | {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip looks into several indexes
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-m", "uv", "--no-config", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def declared(folder: Path, wheel: Path, requirements: Iterable[str]) -> Path:
    """An environment in `folder` with the wheel, and its requirements out of the environment of the tests. Returns its
    folder of scripts."""
    python = _new(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for each in with_dependencies(requirements):
        for name in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__", "/"}:
            if not (site / name).exists():  # several share a folder of a namespace
                (site / name).symlink_to(each.locate_file(name))
    uv("pip", "install", "--offline", "--no-deps", "--python", python, wheel)
    return python.parent


def registry(folder: Path, wheel: Path, requirements: Iterable[str]) -> Path:
    """An environment in `folder` with the wheel and all that it needs, out of package indexes. Returns its folder of
    scripts."""
    python = _new(folder)
    uv("pip", "install", "--constraint", ROOT / "constraints.txt", "--python", python, wheel)
    return python.parent


def oldest(folder: Path, wheel: Path, requirements: Iterable[str]) -> Path:
    """An environment in `folder` with the wheel, and the oldest versions that it asks for, out of package indexes; but
    torch is that of the tests, whose kernels are built. Returns its folder of scripts."""
    python = _new(folder)
    asked_for = folder / "requirements.txt"
    asked_for.write_text("\n".join(each for each in requirements if "extra ==" not in each))
    torch = folder / "constraints.txt"
    torch.write_text(f"torch=={distribution('torch').version}")
    uv("pip", "install", "--resolution", "lowest-direct", "--constraint", torch, "--python", python, "-r", asked_for)
    uv("pip", "install", "--offline", "--no-deps", "--python", python, wheel)
    return python.parent


def _new(folder: Path) -> Path:
    uv("venv", "--python", sys.executable, folder)
    return folder / "bin" / "python"


def with_dependencies(requirements: Iterable[str]) -> list[Distribution]:
    """The installed distributions that satisfy the requirements, and theirs in turn."""
    found: dict[str, Distribution] = {}
    pending = [(Requirement(each), "") for each in requirements]
    seen = set()
    while pending:
        requirement, extra = pending.pop()
        if (str(requirement), extra) in seen or not _is_asked_for(requirement, extra):
            continue
        seen.add((str(requirement), extra))
        name = canonicalize_name(requirement.name)
        each = found.setdefault(name, distribution(name))
        assert requirement.specifier.contains(each.version, prereleases=True), f"{requirement}: {each.version} is here"
        unknown = {canonicalize_name(extra) for extra in requirement.extras} - _extras_of(each)
        assert not unknown, f"{name} has no extra {unknown}"
        needed = [Requirement(text) for text in each.requires or ()]
        pending += [(inner, extra) for inner in needed for extra in ("", *requirement.extras)]
    return list(found.values())


def _is_asked_for(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _extras_of(each: Distribution) -> set[str]:
    return {canonicalize_name(extra) for extra in each.metadata.get_all("Provides-Extra", ())}
