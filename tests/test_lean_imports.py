"""Processes of ours import no compiler and nothing distributed, and get the compiler if something asks for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.demo_model import DEMO_MODEL
from inflight.execution.kernels import cache_folder


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_second_start_imports_neither_compiler_nor_distributed_tensors_nor_algebra(tmp_path: Path) -> None:
    code = f"""
import sys
from inflight.cli import main
sys.argv = ["inflight", "generate", "-m", {str(DEMO_MODEL)!r}, "Once", "--max-tokens", "2", "--quiet"]
import inflight.cli
inflight.cli.end_without_garbage_collection = lambda: None
main()
unwanted = {{"torch._dynamo.convert_frame", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy.core"}}
print(unwanted & set(sys.modules))
"""
    keeps = {"INFLIGHT_CACHE_PREPARATIONS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    (tmp_path / "inflight").mkdir()
    for library in cache_folder().glob("*.so"):
        (tmp_path / "inflight" / library.name).symlink_to(library)
    run(code, **keeps)
    assert run(code, **keeps).endswith("set()\n")


@pytest.mark.thorough
def test_what_is_compiled_gets_the_compiler() -> None:
    code = """
import sys
from inflight.host.lean_imports import import_leanly
import_leanly()
import torch
from transformers import AutoModelForCausalLM
from torch._subclasses.fake_tensor import FakeTensorMode
weight = torch.ones(4, 4)[:, ::2]
print(FakeTensorMode().from_tensor(weight).shape, "torch._dynamo.convert_frame" in sys.modules)
first = sys.modules["torch._dynamo.source"]
@torch.compiler.disable
def left_alone(x): return x + 1
doubled = torch.compile(lambda x: 2 * x, backend="eager")
print(doubled(left_alone(torch.ones(2))).tolist(), torch._dynamo.config.suppress_errors)
kept = first.LocalSource("x"), first.ConstantSource("x")
print(torch._dynamo.source is first, [type(each) in vars(torch._dynamo.source).values() for each in kept])
"""
    assert run(code) == "torch.Size([4, 2]) False\n[4.0, 4.0] False\nFalse [True, True]\n"


@pytest.mark.thorough
def test_symbolic_sizes_get_their_algebra() -> None:
    """Tensors without data ask about their sizes, first with numbers, then with symbols; and all answers are as torch's
    own."""
    code = """
from inflight.host.lean_imports import FOR_NUMBERS, SYMBOLIC, import_leanly
import_leanly()
import sys
import torch
print(torch.arange(3, device="meta").shape == (3,), "sympy.core" in sys.modules)
ours = {name: vars(sys.modules[SYMBOLIC])[name] for name in FOR_NUMBERS}
values = {"is_nested_int": [(2,)], "sym_eq": [(2, 2), ((2, 3), (2, 4))], "guarding_hint_or_throw": [(4,)],
          "has_guarding_hint": [(4,)], "sym_and": [(True, False), (True, True)], "sym_or": [(True, False), (False,)]}
given = {name: values.get(name, [(True,), (False,)]) for name in ours}
answers = {name: [function(*each) for each in given[name]] for name, function in ours.items()}
from torch.fx.experimental.symbolic_shapes import ShapeEnv
size = ShapeEnv().create_unbacked_symint()
print(type(size).__name__, [type(ours[name](size > 3, True)).__name__ for name in ("sym_and", "sym_or")])
theirs = {name: vars(sys.modules[SYMBOLIC])[name] for name in ours}
print([name for name in ours if theirs[name] is ours[name]], "sympy.core" in sys.modules)
print([name for name in ours if [theirs[name](*each) for each in given[name]] != answers[name]])
"""
    assert run(code) == "True False\nSymInt ['SymBool', 'SymBool']\n[] True\n[]\n"


@pytest.mark.thorough
def test_transformers_finds_all_that_it_exports() -> None:
    code = """
from transformers.utils import import_utils
import transformers, transformers.models
print([sorted(each._class_to_module.items()) for each in (transformers, transformers.models)])
"""
    assert run("from inflight.host.lean_imports import import_leanly; import_leanly()" + code) == run(code)
