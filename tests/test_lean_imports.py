"""Processes of ours import no compiler and nothing distributed, and get the compiler if something asks for it."""

import os
import subprocess
import sys
from pathlib import Path

from inflight.demo_model import DEMO_MODEL
from inflight.execution.kernels import cache_folder


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_second_start_imports_neither_compiler_nor_distributed_tensors(tmp_path: Path) -> None:
    code = f"""
import sys
from inflight.cli import main
sys.argv = ["inflight", "generate", "-m", {str(DEMO_MODEL)!r}, "Once", "--max-tokens", "2", "--quiet"]
import inflight.cli
inflight.cli.end_without_garbage_collection = lambda: None
main()
print({{"torch._dynamo.convert_frame", "torch.distributed.tensor", "torch.distributed.fsdp"}} & set(sys.modules))
"""
    keeps = {"INFLIGHT_REMEMBER_VERDICTS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    (tmp_path / "inflight").mkdir()
    for library in cache_folder().glob("*.so"):
        (tmp_path / "inflight" / library.name).symlink_to(library)
    run(code, **keeps)
    assert run(code, **keeps).endswith("set()\n")


def test_what_is_compiled_gets_the_compiler() -> None:
    code = """
from inflight.lean_imports import import_leanly
import_leanly()
import torch
from transformers import AutoModelForCausalLM
@torch.compiler.disable
def left_alone(x): return x + 1
doubled = torch.compile(lambda x: 2 * x, backend="eager")
print(doubled(left_alone(torch.ones(2))).tolist(), torch._dynamo.config.suppress_errors)
"""
    assert run(code) == "[4.0, 4.0] False\n"
