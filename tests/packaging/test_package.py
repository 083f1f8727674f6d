"""The wheel and the sdist are complete, and run in an environment with nothing else."""

import os
import re
import subprocess
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import httpx2
import pytest

import inflight
from tests.packaging.environments import ROOT, build, declared, needs_registry, oldest, registry, uv, with_dependencies
from tests.server.test_serve_command import READY

SOURCES = ROOT / "src"
DEPLOY = ROOT / "examples" / "deploy"


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (each for each in files.namelist() if each.endswith(".dist-info/METADATA"))
        return Parser().parsestr(files.read(name).decode())


@pytest.fixture(
    scope="module", params=[declared, *(pytest.param(each, marks=needs_registry) for each in (registry, oldest))]
)
def scripts(
    request: pytest.FixtureRequest, wheel: Path, metadata: Message, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder: Path = request.param(tmp_path_factory.mktemp("empty") / "venv", wheel, metadata.get_all("Requires-Dist"))
    return folder


def run(scripts: Path, name: str, *arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [scripts / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=of_a_user(scripts), cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "no CPU kernels" not in done.stderr
    return done


def of_a_user(scripts: Path) -> dict[str, str]:
    """The variables of a process that knows nothing of this repository."""
    kept = {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME") if name in os.environ}
    return kept | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    files = {path for path in (SOURCES / "inflight").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    expected = {path.relative_to(SOURCES).as_posix(): path.read_bytes() for path in files}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert {name: archive.read(name) for name in names} == expected
    assert {Path(name).suffix for name in names} > {".py", ".cpp", ".h", ".js", ".jinja", ".json", ".safetensors"}


def test_the_sdist_makes_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    again = build(source, "--wheel", to=tmp_path / "dist")
    assert again.name == wheel.name
    assert again.read_bytes() == wheel.read_bytes()
    assert (source / "tools" / "wheel_kernels.py").exists()  # so that it also makes one with kernels


def test_the_metadata_says_what_this_is(wheel: Path, metadata: Message) -> None:
    assert wheel.name == f"inflight_llm-{inflight.__version__}-py3-none-any.whl"
    assert metadata["Name"] == "inflight-llm"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert not [each for each in metadata.get_all("Requires-Dist", ()) if "@" in each]  # which indexes refuse


def test_every_extra_is_there_and_asks_for_what_the_tests_have(metadata: Message) -> None:
    extras = set(metadata.get_all("Provides-Extra", ()))
    named = set()
    for path in (ROOT / "README.md", DEPLOY / "Dockerfile", *ROOT.glob("docs/*.md"), *SOURCES.rglob("*.py")):
        text = path.read_text()
        lists = re.findall(r"(?:inflight-llm|'\.|\.whl)\[([a-z,-]+)\]", text) + re.findall(r"extra `([a-z-]+)`", text)
        named |= {name for each in lists for name in each.split(",")}
    assert named == extras - {"dev"}
    requirements = [text for text in metadata.get_all("Requires-Dist", ()) if "extra ==" in text]
    installed = [text for text in requirements if "'agents'" not in text]  # which `make agents` adds
    with_dependencies(text.partition(";")[0] for text in installed if not text.startswith("inflight-llm"))


@pytest.mark.thorough
def test_the_commands_run(scripts: Path, tmp_path: Path) -> None:
    done = run(scripts, "inflight-llm", "--version", cwd=tmp_path)
    assert done.stdout == f"inflight, version {inflight.__version__}\n"
    done = run(scripts, "inflight", "generate", "Once upon a time", "--max-tokens", "4", cwd=tmp_path)
    assert len(done.stdout.split()) > 2


@pytest.mark.thorough
def test_the_server_answers(scripts: Path, tmp_path: Path) -> None:
    command = [scripts / "inflight", "serve", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=of_a_user(scripts), cwd=tmp_path, **pipes) as process:  # type: ignore[call-overload]
        try:
            match = next(filter(None, map(READY.search, process.stdout)), None)
            assert match, process.stderr.read()
            assert httpx2.get(f"{match[2]}/health", timeout=60).status_code == 200
            assert httpx2.get(f"{match[2]}/version", timeout=60).json() == {"version": inflight.__version__}
            chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
            answer = httpx2.post(f"{match[2]}/v1/chat/completions", json=chat, timeout=60).json()
            assert answer["usage"]["completion_tokens"] == 3
            assert "vllm:generation_tokens_total" in httpx2.get(f"{match[2]}/metrics", timeout=60).text
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0


@needs_registry
@pytest.mark.parametrize("name", ["inflight", "inflight-llm"])
def test_uvx_runs_the_wheel(name: str, wheel: Path) -> None:
    constraints = ROOT / "constraints.txt"
    out = uv("tool", "run", "--constraints", constraints, "--from", wheel, name, "--version")
    assert out == f"inflight, version {inflight.__version__}\n"


@needs_registry
def test_every_extra_resolves(metadata: Message) -> None:
    for extra in metadata.get_all("Provides-Extra", ()):
        uv("pip", "compile", "--extra", extra, "--constraint", ROOT / "constraints.txt", ROOT / "pyproject.toml")
