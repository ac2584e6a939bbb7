"""Run the imports of forward outside of the trace: tensors that a module makes when it is imported are real ones.

    def forward(self, x):
        from library import scaled         library: def scaled(x, scale=torch.tensor(1.0)): ...

In the trace, the default would be a fake tensor without elements, for the rest of the process.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType

from onnxtrain.ops.python_function.run_context import untraced
from onnxtrain.torch_compat.replacement import in_thread


@contextmanager
def untraced_imports() -> Iterator[None]:
    """Let this thread import modules as if it traced nothing. The caller must hold the capture lock."""
    import_statement, import_module = builtins.__import__, importlib.import_module
    builtins.__import__ = in_thread(partial(_import, import_statement), import_statement)
    importlib.import_module = in_thread(partial(_import_module, import_module), import_module)
    try:
        yield
    finally:
        builtins.__import__, importlib.import_module = import_statement, import_module


def _import(
    original: Callable[..., ModuleType],
    name: str,
    scope: Mapping[str, object] | None = None,
    local: Mapping[str, object] | None = None,
    names: Sequence[str] = (),
    level: int = 0,
) -> ModuleType:
    """Replace the function that an import statement calls: a thousand times a trace, in functions of sympy."""
    imported = sys.modules.get(_absolute(name, str((scope or {}).get("__package__") or ""), level))
    if imported is not None and all(hasattr(imported, each) for each in names or ()):
        return original(name, scope, local, names, level)
    with untraced():
        return original(name, scope, local, names, level)


def _absolute(name: str, package: str, level: int) -> str:
    """Return the name of a module that `from ..name import x` in a module of a package imports from."""
    if not level:
        return name
    parts = package.split(".")
    return ".".join([*parts[: len(parts) - level + 1], *([name] if name else [])])


def _import_module(original: Callable[..., ModuleType], name: str, package: str | None = None) -> ModuleType:
    if name in sys.modules:
        return original(name, package)
    with untraced():
        return original(name, package)
