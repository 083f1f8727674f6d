"""Processes of ours that do without the parts of torch and transformers that only compiling and distributed training
need: to import them takes longer than all that we need of transformers.

Only for processes that run nothing but inflight: the command line, and an engine beside its callers.
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
    """What a decorator is that leaves functions alone, with or without options."""
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
"""What functions of `SYMBOLIC` return for plain numbers: all that a tensor without data asks of them."""
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
"""What is asked of these modules where nothing is compiled, distributed or symbolic."""
LIGHT_PARTS = ("torch._dynamo.config", "torch._dynamo._trace_wrapped_higher_order_op")
"""Parts of them that need no other."""
AVAILABILITY = "transformers.utils.import_utils"


def import_leanly() -> None:
    """Leave these modules out from now on. Whatever asks one of them for more gets it."""
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
    """Loads the module in which `transformers` asks what there is: nothing is distributed, and what each of its
    thousands of files exports is read once, from the line that says so."""

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
    """A module that runs when it is asked for more than `DEFERRED` has of it."""

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
            sys.modules.pop(part, None)  # to be imported as it is
    parent = sys.modules.get(module.__name__.rpartition(".")[0])
    if isinstance(parent, _DeferredModule):
        _complete(parent)
        vars(module).update(vars(importlib.import_module(module.__name__)))
    else:
        module.__loader__.exec_module(module)
    return True
