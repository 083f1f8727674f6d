"""The package, built once for all tests of it."""

from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, build


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "--sdist", to=tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "--wheel", to=tmp_path_factory.mktemp("wheel"))
