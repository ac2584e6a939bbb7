"""Test on a small module whether a check of a module's state works on this version of Python and PyTorch.

Versions store attributes in different ways, and a check that misses a change would give silently wrong results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch

from onnxtrain.torch_compat.replacement import replaced

# From a module to a function that returns whether the module is unchanged.
CompileCheck: TypeAlias = Callable[[torch.nn.Module], Callable[[], bool]]


def detects_each_kind_of_change(compile_check: CompileCheck) -> bool:
    """Return whether a check made by `compile_check` detects one change of each kind, and that it is reverted."""
    module = _module()
    is_unchanged = compile_check(module)
    # Twice, because Python may move attributes in memory when they are first read or first changed.
    return is_unchanged() and all(_detects(is_unchanged, change) for _ in range(2) for change in _changes(module))


def _detects(is_unchanged: Callable[[], bool], change: AbstractContextManager[None]) -> bool:
    with change:
        is_detected = not is_unchanged()
    return is_detected and is_unchanged()


class _Config:
    def __init__(self) -> None:
        self.rate = 0.5


# As text, because code in this package is not followed.
_READER_SOURCE = """
def make(cell):
    def read(x, default=1.0):
        return x * FACTOR + cell + default
    return read
"""


def _reader() -> Any:
    """Make a function that reads a global, a closure and a default argument."""
    scope: dict[str, Any] = {"__name__": "reader", "FACTOR": 2.0}
    exec(compile(_READER_SOURCE, "<reader>", "exec"), scope)
    return scope["make"](2.0)


def _module() -> Any:
    class Module(torch.nn.Module):
        scale = 2.0

        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Identity()
            self.weight = torch.nn.Parameter(_tensor())
            self.register_buffer("mean", _tensor())
            self.factor = 2.0
            self.items = [1, 2]
            self.table = {"a": 1}
            self.config = _Config()
            self.reader = _reader()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    return Module()


def _tensor(size: int = 2) -> torch.Tensor:
    return torch.empty(size, dtype=torch.float32, device="cpu")


def _changes(module: Any) -> Iterator[AbstractContextManager[None]]:
    kind = type(module)
    yield replaced(module, "training", not module.training)
    yield replaced(module.inner, "training", not module.inner.training)
    yield replaced(module, "factor", 3.0)
    yield replaced(module, "fresh", 1)
    yield replaced(module, "forward", torch.relu)
    yield replaced(module, "config", _Config())
    yield replaced(module.config, "rate", 0.25)
    yield replaced(module.config, "fresh", 0.25)
    yield replaced(kind, "forward", torch.relu)
    yield _attribute(module.inner, "__class__", torch.nn.Flatten)
    yield _item(module.items, 0, 3)
    yield _item(module.table, "a", 3)
    yield _item(module.table, "b", 3)
    yield _item(module._modules, "inner", torch.nn.Identity())
    yield _item(module._modules, "fresh", torch.nn.Identity())
    yield _item(module._parameters, "weight", torch.nn.Parameter(_tensor(3)))
    yield _item(module._parameters, "weight", None)
    yield _item(module._parameters, "fresh", None)
    yield _item(module._buffers, "mean", _tensor().double())
    yield _item(module.reader.__globals__, "FACTOR", 3.0)
    yield _attribute(module.reader.__closure__[0], "cell_contents", 3.0)
    yield _attribute(module.reader, "__defaults__", (3.0,))
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        yield _item(getattr(module.inner, hooks), 0, torch.relu)
    yield _without_gradient(module.weight)


@contextmanager
def _item(holder: Any, key: Any, value: object) -> Iterator[None]:
    existed = not isinstance(holder, MutableMapping) or key in holder
    before = holder[key] if existed else None
    holder[key] = value
    try:
        yield
    finally:
        if existed:
            holder[key] = before
        else:
            del holder[key]


@contextmanager
def _attribute(holder: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextmanager
def _without_gradient(parameter: torch.nn.Parameter) -> Iterator[None]:
    parameter.requires_grad_(False)
    try:
        yield
    finally:
        parameter.requires_grad_(True)
