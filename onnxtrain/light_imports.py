"""Imports of PyTorch's export without parts that nobody asks for: a third of what `import onnxtrain` takes beside it.

Seconds of a processor, of 0.51 in all (the least of six imports beside torch and transformers):

* networkx, 0.09: two of PyTorch's modules name it in annotations, and compute with it for a budget of memory only.
* The archive of exported programs, 0.03: its package imports all that reads and writes files, for two of its parts.
* Where an operator was registered, 0.06: `inspect` looks for the source among all files of all modules. A frame knows
  its file and line.

Each works as ever when it is used.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

_GRAPHS = "networkx"
_NAME_GRAPHS = (
    "torch._functorch._activation_checkpointing.graph_info_provider",
    "torch._functorch._activation_checkpointing.knapsack_evaluator",
)
_DEFERRED = ("torch.export.pt2_archive",)


@contextmanager
def unused_left_out() -> Iterator[None]:
    """What is imported inside for the first time is imported so."""
    finder = _Finder()
    with ExitStack() as stack:
        for module, name, value in (
            ("torch._library.utils", "get_source", _line_of_caller),
            ("torch.library", "inspect", SimpleNamespace(**{**vars(inspect), "getmodule": _module_of_caller})),
        ):
            if hasattr(sys.modules.get(module), name):
                stack.callback(setattr, sys.modules[module], name, getattr(sys.modules[module], name))
                setattr(sys.modules[module], name, value)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield


def _line_of_caller(stacklevel: int) -> str:
    """What `torch._library.utils.get_source` gives."""
    frame = sys._getframe(stacklevel)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _module_of_caller(of: Any) -> ModuleType | None:
    """What `inspect.getmodule` gives, which `torch.library` asks of frames alone."""
    found = sys.modules.get(of.f_globals.get("__name__", "")) if isinstance(of, FrameType) else None
    return found or inspect.getmodule(of)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in (*_NAME_GRAPHS, *_DEFERRED):
            return None
        if fullname in _NAME_GRAPHS and _GRAPHS in sys.modules:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = (_Deferring if fullname in _DEFERRED else _WithoutGraphs)(spec.loader)
        return spec


class _Wrapping(Loader):
    """A loader of a module that another one finds."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # of a copy that is not made yet
            raise AttributeError(name)
        return getattr(self.loader, name)  # get_source and its like


class _WithoutGraphs(_Wrapping):
    """Runs a module to which `import networkx` gives a stand-in. No other module sees it."""

    def exec_module(self, module: ModuleType) -> None:
        graphs = _OnUse(_GRAPHS)

        def import_(name: str, *args: Any, **kwargs: Any) -> ModuleType:
            return graphs if name == _GRAPHS else builtins.__import__(name, *args, **kwargs)

        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_}
        self.loader.exec_module(module)
        graphs.__dict__["serves"] = True


class _OnUse(ModuleType):
    """A module that is imported when something in it is used, and not where an annotation names it."""

    serves = False

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name) if self.serves else Any


class _Deferring(_Wrapping):
    """Runs a package when something in it is asked for that is no part of it: parts can be imported before."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self.lock = threading.RLock()
        self.runs = False

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Deferred

    def run(self, module: ModuleType) -> None:
        with self.lock:
            if self.runs or type(module) is not _Deferred:  # asked by itself, or run by another thread meanwhile
                return
            self.runs = True
            try:
                self.loader.exec_module(module)
                module.__class__ = ModuleType  # type: ignore[assignment]  # mypy knows no other class of it
            finally:
                self.runs = False


class _Deferred(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):  # those are asked of every module
            loader = self.__dict__["__spec__"].loader
            loader.run(self)
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
