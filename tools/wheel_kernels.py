"""Puts compiled kernels into a wheel, for every kind of CPU that it serves: a build hook of hatchling.

It runs only if `HATCH_BUILD_HOOK_ENABLE_CUSTOM` is true (`make wheel`, cibuildwheel). Any other wheel has sources only,
and its kernels are built where it runs. `INFLIGHT_TARGET_CPU` names one kind of CPU to build for, instead of all.
`INFLIGHT_TORCH_VERSIONS` names versions of torch, apart from the one that is installed, to build bridges for: their
wheels are downloaded (half a gigabyte each) for the headers in them.
"""

import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = "inflight/execution/kernels"


class WheelKernels(BuildHookInterface[Any]):
    """The hook. The kernels serve any torch, a bridge to it one version: for a version that has none it is built where
    the wheel is installed."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """What the environment needs, if `build` makes one."""
        return ["torch"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels, and have them put into the wheel."""
        if self.target_name != "wheel" or version == "editable":
            return
        building = _building(Path(self.root))
        asked = os.environ.get("INFLIGHT_TARGET_CPU")
        targets = [each for each in building.TARGETS.get(platform.machine(), ()) if asked in (None, each.name)]
        if not targets:
            raise ValueError(f"there are no kernels for {asked or platform.machine()!r}")
        self._folder = tempfile.TemporaryDirectory(prefix="inflight-wheel-")
        for target in targets:
            print(f"kernels for {target.name} …", file=sys.stderr, flush=True)
            library = Path(self._folder.name) / f"{target.name}.so"
            building.build_kernels(library, [*target.flags, "-s"])
            build_data["force_include"][str(library)] = f"{KERNELS}/{building.carried_kernels_name(target)}"
        bridges = Path(self._folder.name) / "bridges"
        bridges.mkdir()
        building.build_bridge(bridges / Path(building.carried_bridge_name()).name)
        for torch_version in os.environ.get("INFLIGHT_TORCH_VERSIONS", "").split():
            bridge = bridges / Path(building.carried_bridge_name(torch_version)).name
            if not bridge.exists():
                print(f"bridge to torch {torch_version} …", file=sys.stderr, flush=True)
                with tempfile.TemporaryDirectory() as folder:
                    building.build_bridge(bridge, _downloaded_torch(torch_version, Path(folder)))
        for bridge in bridges.iterdir():
            build_data["force_include"][str(bridge)] = f"{KERNELS}/carried/{bridge.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel is written: remove what was compiled for it."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _downloaded_torch(version: str, folder: Path) -> Path:
    """What a bridge needs of a version of torch: its headers and two libraries, in a folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, f"torch=={version}"], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        needed = ("torch/include/", "torch/lib/libc10.so", "torch/lib/libtorch_cpu.so")
        files.extractall(folder, [name for name in files.namelist() if name.startswith(needed)])
    return folder / "torch"


def _building(root: Path) -> ModuleType:
    """`building.py`, without the package around it, which would need all of its dependencies."""
    spec = importlib.util.spec_from_file_location("building", root / "src" / KERNELS / "building.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module
