"""The Dockerfile is valid, matches the tree, and, where Docker runs, builds an image that serves."""

import json
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from inflight.cli.serve import serve
from inflight.server.endpoints import HEALTH_PATH
from tests.packaging.environments import ROOT, build, needs_registry
from tests.server.test_kubernetes import FOLDER as KUBERNETES
from tests.server.test_kubernetes import OF_IMAGE, manifests

DOCKERFILE = KUBERNETES.parent / "Dockerfile"
IMAGE = "inflight:test"
HADOLINT = shutil.which("hadolint", path=sysconfig.get_path("scripts"))


def instructions() -> list[tuple[str, str]]:
    """Each instruction's name, and what follows it."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in whole.splitlines())]


def the_last(name: str) -> str:
    return [rest for each, rest in instructions() if each == name][-1]


@pytest.mark.skipif(HADOLINT is None, reason="hadolint has no package for this system")
def test_a_linter_has_nothing_to_say() -> None:
    done = subprocess.run([HADOLINT, "--failure-threshold", "style", DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_makes_the_wheel(tmp_path: Path, wheel: Path) -> None:
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split()
    bound = re.findall(r"type=bind,source=([^,]+)", DOCKERFILE.read_text())
    copied = []
    for name, rest in instructions():
        if name == "COPY":
            *sources, folder = shlex.split(rest)
            copied += sources
            for source in sources:
                target = tmp_path / folder / ("" if (ROOT / source).is_dir() else Path(source).name)
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                target.parent.mkdir(exist_ok=True)
                copy(ROOT / source, target)
    assert {f"!{each}" for each in (*copied, *bound)} == {each for each in ignored if each.startswith("!")}
    again = build(tmp_path, "--wheel", to=tmp_path / "wheels")
    assert again.read_bytes() == wheel.read_bytes()


def test_the_server_is_process_1_of_a_user_without_rights() -> None:
    command = json.loads(the_last("ENTRYPOINT"))
    assert command == ["inflight", "serve", *OF_IMAGE]
    options = serve.make_context("serve", command[2:]).params
    assert int(the_last("EXPOSE")) == options["port"]
    assert f"http://127.0.0.1:{options['port']}{HEALTH_PATH}'" in the_last("HEALTHCHECK")
    pod = manifests()["Deployment"]["spec"]["template"]["spec"]
    assert int(the_last("USER")) == pod["securityContext"]["runAsUser"]
    (volume,) = (each["mountPath"] for each in pod["containers"][0]["volumeMounts"])
    assert the_last("VOLUME") == volume


def docker(*arguments: str | Path) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout.strip()


def has_docker() -> bool:
    return shutil.which("docker") is not None and not subprocess.run(["docker", "info"], capture_output=True).returncode


@pytest.fixture
def container() -> Iterator[str]:
    docker("build", "--file", DOCKERFILE, "--tag", IMAGE, ROOT)
    name = docker("run", "--detach", "--publish", "127.0.0.1::8000", IMAGE)
    try:
        yield name
    finally:
        docker("rm", "--force", name)


@needs_registry
@pytest.mark.skipif(not has_docker(), reason="no Docker daemon runs here")
def test_docker_builds_an_image_that_serves(container: str) -> None:
    with subprocess.Popen(["docker", "logs", "--follow", container], stderr=subprocess.PIPE, text=True) as log:
        assert log.stderr is not None
        lines = iter(log.stderr)
        first = next((line for line in lines if "is served at" in line), None)
        log.kill()
    assert first is not None
    answer = httpx2.get(f"http://{docker('port', container, '8000')}/health", timeout=60)
    assert answer.status_code == 200
    assert docker("exec", container, "id", "--user") == "1000"
    docker("stop", "--time", "60", container)
    assert docker("inspect", "--format", "{{.State.ExitCode}}", container) == "0"
