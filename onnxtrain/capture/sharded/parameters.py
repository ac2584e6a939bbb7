"""Make a module with DTensor parameters capturable: during the export its parameters are the local tensors.

While its forward is traced, they are `ShardedValue`s, and so is what the hooks of torch.distributed.tensor.parallel
make of inputs and outputs.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from onnxtrain.capture.sharded.layout import is_sharded, sharding_of
from onnxtrain.capture.sharded.value import ShardedValue
from onnxtrain.torch_compat.patch_points import DTENSOR_OF_STYLES

_STYLES = "torch.distributed.tensor.parallel.style"
_DISTRIBUTE = "torch.distributed.tensor._api"  # distribute_module, which registers the functions of styles as hooks


class LocalTensors:
    """The DTensor parameters and buffers of a module, in whose place it holds local tensors during the export."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._entries: list[tuple[dict[str, Any], str, Any]] = []
        for submodule in module.modules():
            tables: tuple[dict[str, Any], ...] = (submodule._parameters, submodule._buffers)
            for table in tables:
                self._entries += [(table, name, tensor) for name, tensor in table.items() if is_sharded(tensor)]

    @contextmanager
    def as_local_tensors(self) -> Iterator[None]:
        """Let the module hold its local tensors."""
        locals_of: dict[int, Any] = {}
        for table, name, tensor in self._entries:
            table[name] = locals_of.setdefault(id(tensor), local_of(tensor))
        try:
            yield
        finally:
            for table, name, tensor in self._entries:
                table[name] = tensor


class ShardedParameters(LocalTensors):
    """Those that forward sees as DTensors.

    Raises:
        CaptureError: one has a layout that a graph does not support.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._shardings = [sharding_of(tensor) for _, _, tensor in self._entries]
        self._styles = _styles_of(module)

    @contextmanager
    def as_values(self) -> Iterator[None]:
        """Let forward see DTensors, while the module holds the traced tensors of an export."""
        if not self._entries:
            yield
            return
        traced = [table[name] for table, name, _ in self._entries]
        values: dict[int, ShardedValue] = {}
        for (table, name, _), (layout, group), local in zip(self._entries, self._shardings, traced, strict=True):
            table[name] = values.setdefault(id(local), ShardedValue(group, layout, local))
        owner = threading.get_ident()
        try:
            with DTENSOR_OF_STYLES.wrapped(lambda original: _stand_in(original, owner)), _unchanged(self._styles):
                yield
        finally:
            for (table, name, _), local in zip(self._entries, traced, strict=True):
                table[name] = local


def local_of(tensor: Any) -> torch.Tensor:
    """Return the tensor of this rank of a DTensor, as a parameter if that is one."""
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(local, requires_grad=tensor.requires_grad)
    return local


def _stand_in(original: Any, owner: int) -> Any:
    """Return the class that the hooks take for DTensor on the capturing thread."""

    class OfThread(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, ShardedValue | original)

    class DTensor(metaclass=OfThread):
        @staticmethod
        def from_local(*args: Any, **kwargs: Any) -> Any:
            function = ShardedValue.from_local if threading.get_ident() == owner else original.from_local
            return function(*args, **kwargs)

    return DTensor


def local_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local tensors of DTensors, through which autograd passes their gradients; others as they are."""
    return [t.to_local() if is_sharded(t) else t for t in tensors]  # type: ignore[attr-defined]  # of a DTensor


def taking_local_tensors(run: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Make a function that takes DTensors in the positions in which `tensors` has some, from one of local tensors."""
    positions = [position for position, tensor in enumerate(tensors) if is_sharded(tensor)]
    if not positions:
        return run

    def run_on_locals(*arguments: Any) -> Any:
        converted = list(arguments)
        for position in positions:
            converted[position] = converted[position].to_local()
        return run(*converted)

    return run_on_locals


def is_hook_of_style(hook: Callable[..., Any]) -> bool:
    """Return whether a hook is one of a parallel style, PyTorch's or the user's, which a capture runs with forward."""
    if hook.__module__ == _STYLES:
        return True
    function = _registered_by_style(hook)
    module = getattr(getattr(function, "func", function), "__module__", None)
    return module == _STYLES or _style_of(function) is not None


def _registered_by_style(hook: Callable[..., Any]) -> Any:
    """Return the function that `distribute_module` made a hook of; None of other hooks."""
    if hook.__module__ != _DISTRIBUTE:
        return None
    captured = inspect.getclosurevars(hook).nonlocals
    return captured.get("input_fn") or captured.get("output_fn")


def _style_of(function: Any) -> Any:
    """Return the user's `ParallelStyle` of which a function is a method, else None."""
    style = getattr(function, "__self__", None)
    return style if _STYLES in sys.modules and isinstance(style, sys.modules[_STYLES].ParallelStyle) else None


def _styles_of(module: torch.nn.Module) -> list[Any]:
    """Return the styles whose methods are hooks of the submodules."""
    tables = (table for m in module.modules() for table in (m._forward_pre_hooks, m._forward_hooks))
    styles = (_style_of(_registered_by_style(hook)) for table in tables for hook in table.values())
    return [style for style in styles if style is not None]


@contextmanager
def _unchanged(styles: Sequence[Any]) -> Iterator[None]:
    """Restore what the hooks of styles keep for one another, which in a trace is of the trace."""
    kept = [(style, dict(vars(style))) for style in styles]
    try:
        yield
    finally:
        for style, attributes in kept:
            vars(style).clear()
            vars(style).update(attributes)
