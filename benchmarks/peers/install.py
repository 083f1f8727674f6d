"""Makes the peers' environments: a virtual environment for each, filled by pip; llama.cpp is also compiled.

All requirements pin torch, so that pip installs the same version everywhere. If pip would choose a build with CUDA,
first set an index of CPU builds in pip's own configuration.
"""

import subprocess
import sys
import tarfile
from pathlib import Path

from benchmarks.peers.catalogue import Peer

LLAMACPP_SOURCES = "llama-cpp-python==0.3.36"
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)


def install(peer: Peer, num_jobs: int) -> None:
    """Make the peer's environment, or update it to its requirements. Raises `CalledProcessError`."""
    if peer.environment is None:
        return
    _run(sys.executable, "-m", "venv", peer.root)
    _run(peer.python, "-m", "pip", "install", "--quiet", "-r", peer.requirements)
    if peer.unwanted_packages:
        _run(peer.python, "-m", "pip", "uninstall", "--quiet", "--yes", *peer.unwanted_packages)
    if peer.needs_build:
        _build_llamacpp(peer, num_jobs)
    peer.installed_mark.touch()


def llamacpp_sources(peer: Peer) -> Path:
    """Return the folder of llama.cpp's own sources, which the Python binding's source distribution contains."""
    return next((peer.root / "source").glob("llama_cpp_python-*/vendor/llama.cpp"))


def _build_llamacpp(peer: Peer, num_jobs: int) -> None:
    sources = peer.root / "source"
    download = ("pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", sources, LLAMACPP_SOURCES)
    _run(peer.python, "-m", *download)
    with tarfile.open(next(sources.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(sources, filter="data")
    build = peer.root / "build"
    _run("cmake", "-S", llamacpp_sources(peer), "-B", build, *CMAKE_OPTIONS)
    _run("cmake", "--build", build, "--target", "llama-server", "llama-quantize", "--parallel", num_jobs)


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)
