"""Import `onnxruntime.training` and its submodules from the folder `training` next to this file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

NAME = "onnxruntime.training"
_FOLDER = Path(__file__).parent / "training"


class _Finder:
    """A meta path finder for these names only; it is asked before the file system."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != NAME and not name.startswith(f"{NAME}."):
            return None
        path_of_module = _FOLDER.joinpath(*name.split(".")[2:])
        if (path_of_module / "__init__.py").exists():
            return importlib.util.spec_from_file_location(
                name, path_of_module / "__init__.py", submodule_search_locations=[str(path_of_module)]
            )
        file = path_of_module.with_suffix(".py")
        return importlib.util.spec_from_file_location(name, file) if file.exists() else None


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
