"""Skips the parts of torch and transformers for compiling and distributed training in our own processes: importing them
takes longer than everything we need of transformers.

Only for processes that run only inflight: the command line, and an engine's process.
"""

import functools
import importlib
import operator
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _unchanged(function: Any = None, *args: Any, **options: Any) -> Any:
    """A no-op decorator, with or without options."""
    return _unchanged if function is None else function


SYMBOLIC = "torch.fx.experimental.symbolic_shapes"


def _unless_symbolic(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `SYMBOLIC`, with its answer for plain numbers."""

    def is_plain(value: Any) -> bool:
        return all(map(is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, (int, float))

    def function(*values: Any) -> Any:
        if is_plain(values):
            return answer(*values)
        _complete(sys.modules[SYMBOLIC])
        return getattr(sys.modules[SYMBOLIC], name)(*values)

    return function


FOR_NUMBERS: dict[str, Callable[..., Any]] = {
    "expect_true": bool,
    "guard_or_false": bool,
    "guard_or_true": bool,
    "guard_size_oblivious": bool,
    "guarding_hint_or_throw": int,
    "has_guarding_hint": lambda size: True,
    "is_nested_int": lambda size: False,
    "statically_known_true": bool,
    "sym_and": lambda *conditions: all(conditions),
    "sym_eq": operator.eq,
    "sym_or": lambda *conditions: any(conditions),
}
"""The functions of `SYMBOLIC` for plain numbers, as needed by meta tensors."""
DEFERRED: dict[str, dict[str, Any]] = {
    "torch._dynamo": {
        "disable": _unchanged,
        "allow_in_graph": _unchanged,
        "assume_constant_result": _unchanged,
        "is_compiling": lambda: False,
    },
    "torch._dynamo.source": {
        "AttrSource": lambda base, member: base,
        "ConstantSource": lambda name: name,
        "RandomValueSource": type("RandomValueSource", (), {}),
    },
    "torch.distributed.tensor": {"DTensor": type("DTensor", (), {})},
    "sympy": {"Basic": type("Basic", (), {})},
    SYMBOLIC: {name: _unless_symbolic(name, answer) for name, answer in FOR_NUMBERS.items()},
}
"""The attributes of these modules that are used without compiling, distribution and symbolic shapes."""
LIGHT_PARTS = ("torch._dynamo.config", "torch._dynamo._trace_wrapped_higher_order_op")
"""Submodules without dependencies."""
AVAILABILITY = "transformers.utils.import_utils"


def import_leanly() -> None:
    """Defer these modules. Accessing any other attribute loads them."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        is_deferred = fullname in DEFERRED
        if isinstance(parent, _DeferredModule):
            is_deferred &= isinstance(parent.__loader__, _Deferring)
            if not is_deferred and fullname not in LIGHT_PARTS:
                _complete(parent)
        if not is_deferred and fullname != AVAILABILITY:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = (_Deferring if is_deferred else _LeanAvailability)(spec.loader)
        return spec


class _Wrapped(Loader):
    """Args: loader: the module's own."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)


class _LeanAvailability(_Wrapped):
    """Loads `transformers`' availability module: distributed support is off, and each file's exports are read once,
    from its `__all__` line."""

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        functions = vars(module)
        exports, structure = functions["fetch__all__"], functions["create_import_structure_from_path"]
        functions["is_torch_distributed_available"] = lambda: False
        functions["fetch__all__"] = lambda content: exports(content[max(content.find("\n__all__"), 0) :])
        functions["create_import_structure_from_path"] = functools.cache(structure)


class _Deferring(_Wrapped):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(DEFERRED[module.__name__])


class _DeferredModule(ModuleType):
    """A module that runs on access to attributes beyond `DEFERRED`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not _complete(self):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)


def _complete(module: ModuleType) -> bool:
    """Run a module, if it has not. Returns whether it has just run."""
    if not isinstance(module.__loader__, _Deferring) or module.__spec__ is None:
        return False
    module.__loader__ = module.__spec__.loader = module.__loader__.loader
    for part in DEFERRED:
        if part.startswith(f"{module.__name__}."):
            sys.modules.pop(part, None)  # imported normally
    parent = sys.modules.get(module.__name__.rpartition(".")[0])
    if isinstance(parent, _DeferredModule):
        _complete(parent)
        vars(module).update(vars(importlib.import_module(module.__name__)))
    else:
        module.__loader__.exec_module(module)
    return True
