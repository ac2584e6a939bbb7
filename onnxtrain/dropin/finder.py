"""Import `onnxruntime.training` and its submodules, as `names.py` lists them."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from onnxtrain.dropin.names import FILES, MODULES
from onnxtrain.dropin.removed import MODULES as REMOVED_MODULES
from onnxtrain.dropin.removed import message

NAME = "onnxruntime.training"
_PACKAGE = Path(__file__).parents[1]
_NAMES = {"", *MODULES, *FILES}
_PACKAGES = {name[:dot] for name in {*_NAMES, *REMOVED_MODULES} for dot in range(len(name)) if name[dot] == "."} | {""}


class _Finder:
    """A meta path finder for these names only; it is asked before the file system."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != NAME and not name.startswith(f"{NAME}."):
            return None
        relative = name[len(NAME) + 1 :]
        if relative in FILES:
            locations: list[str] | None = [] if relative in _PACKAGES else None
            file = _PACKAGE / FILES[relative]
            loader = _FileLoader(name, str(file))
            return importlib.util.spec_from_file_location(
                name, file, loader=loader, submodule_search_locations=locations
            )
        if relative in _NAMES | _PACKAGES:
            return ModuleSpec(name, _Loader(), is_package=relative in _PACKAGES)
        if removed := message(relative):
            raise ModuleNotFoundError(removed, name=name)
        return None


class _FileLoader(SourceFileLoader):
    """Loads a file of onnxtrain under the former name."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        vars(module)["__getattr__"] = functools.partial(_refuse, module.__name__)


def _refuse(module: str, name: str) -> NoReturn:
    """Raise the error of a name that a module does not have.

    A removed name raises ImportError: `from ... import ...` hides the text of an AttributeError.
    """
    if removed := message(f"{module[len(NAME) + 1 :]}.{name}"):
        raise ImportError(removed, name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class _Loader(Loader):
    """Loads a module whose names are imported on first use: `onnxruntime.training.api` needs no torch."""

    def exec_module(self, module: ModuleType) -> None:
        relative = module.__name__[len(NAME) + 1 :]
        sources, prefix = _sources(relative), f"{relative}." if relative else ""
        submodules = {name[len(prefix) :].partition(".")[0] for name in _NAMES if name.startswith(prefix) and name}

        def get(name: str) -> Any:
            if name in sources:
                source, original = sources[name]
                return getattr(importlib.import_module(source), original)
            if name in submodules:
                return importlib.import_module(f"{module.__name__}.{name}")
            return _refuse(module.__name__, name)

        module.__doc__ = f"`{module.__name__}`, by onnxtrain."
        names = [*sources, *sorted(name for name in submodules if not name.startswith("_"))]
        vars(module).update(__getattr__=get, __all__=names, __dir__=lambda: [*vars(module), *names])


def _sources(relative: str) -> dict[str, tuple[str, str]]:
    """Return, for each name of a module, the module of onnxtrain that defines it, and its name there."""
    sources = {}
    for source, names in MODULES.get(relative, {}).items():
        for entry in importlib.import_module(source).__all__ if names == "*" else names.split():
            name, _, original = entry.partition("=")
            sources[name] = source, original or name
    return sources


def install() -> None:
    """Install the finder, once.

    Raises:
        ImportError: onnxruntime is not installed, or another `onnxruntime.training` is already imported.
    """
    if _Finder in sys.meta_path:
        return
    if importlib.util.find_spec("onnxruntime") is None:
        raise ImportError(
            "onnxtrain.dropin requires onnxruntime, which is not installed: pip install 'onnxtrain[ort]'."
        )
    if NAME in sys.modules:
        raise ImportError(
            f"{NAME} is already imported from {sys.modules[NAME].__file__}: import onnxtrain.dropin first."
        )
    sys.meta_path.insert(0, _Finder)
