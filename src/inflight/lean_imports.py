"""Processes of ours that do without the parts of torch and transformers that only compiling and distributed training
need: to import them takes longer than all that we need of transformers.

Only for processes that run nothing but inflight: the command line, and an engine beside its callers.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _unchanged(function: Any = None, *args: Any, **options: Any) -> Any:
    """What a decorator is that leaves functions alone, with or without options."""
    return _unchanged if function is None else function


DEFERRED: dict[str, dict[str, Any]] = {
    "torch._dynamo": {
        "disable": _unchanged,
        "allow_in_graph": _unchanged,
        "assume_constant_result": _unchanged,
        "is_compiling": lambda: False,
    },
    "torch.distributed.tensor": {"DTensor": type("DTensor", (), {})},
}
"""What is asked of these modules where nothing is compiled or distributed."""
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
        if fullname in DEFERRED:
            return ModuleSpec(fullname, _Deferring(), is_package=True)
        parent = fullname.rpartition(".")[0]
        if parent in DEFERRED and fullname not in LIGHT_PARTS:
            _complete(sys.modules[parent])
        if fullname != AVAILABILITY:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _NotDistributed(spec.loader)
        return spec


class _NotDistributed(Loader):
    """Loads the module in which `transformers` asks what there is, and lets it say that nothing is distributed."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        vars(module)["is_torch_distributed_available"] = lambda: False


class _Deferring(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        parent, _, name = module.__name__.rpartition(".")
        module.__path__ = [f"{folder}/{name}" for folder in sys.modules[parent].__path__]
        vars(module).update(DEFERRED[module.__name__])


class _DeferredModule(ModuleType):
    """A module that runs when it is asked for more than `DEFERRED` has of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not _complete(self):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)


def _complete(module: ModuleType) -> bool:
    """Run a module, if it has not. Returns whether it has just run."""
    if not isinstance(module.__loader__, _Deferring):
        return False
    spec = PathFinder.find_spec(module.__name__, sys.modules[module.__name__.rpartition(".")[0]].__path__)
    assert spec is not None
    assert spec.loader is not None
    module.__spec__, module.__loader__ = spec, spec.loader
    spec.loader.exec_module(module)
    return True
