"""Access decompositions of composite operators, and the operators and tokens that functionalization introduces."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch.export.exported_program import ExportedProgram

from onnxtrain.torch_compat.internal import Internal, can_be_entered, required

auto_functionalized: Any = Internal[Any](
    "auto_functionalized",
    lambda: importlib.import_module("torch._higher_order_ops.auto_functionalize").auto_functionalized,
    why="functionalization wraps custom operators that mutate their arguments in it",
    fallback=None,
    cost="modules that call such operators run in PyTorch",
    check=lambda part: part.name() == "auto_functionalized",
).get()


decomposition_table: dict[Any, Callable[..., Any]] = Internal[Any](
    "decomposition_table",
    lambda: importlib.import_module("torch._decomp").decomposition_table,
    why="fake tensors look up PyTorch's reference functions there",
    fallback={},
    cost="functionalization uses PyTorch's reference functions; modules with the losses whose functions fail run in "
    "PyTorch",
    check=lambda part: callable(part[torch.ops.aten.addcmul.default]),
).get()


@contextmanager
def without_reference_functions(operators: Collection[Any]) -> Iterator[None]:
    """Remove PyTorch's reference functions of these operators from its table for the context, for all threads."""
    removed = {op: decomposition_table.pop(op) for op in operators if op in decomposition_table}
    try:
        yield
    finally:
        decomposition_table.update(removed)


def _find_composites() -> tuple[Callable[[], Any], Callable[[Any], bool], Callable[[Any], Callable[..., Any]]]:
    utils = importlib.import_module("torch._export.utils")
    return utils._collect_all_valid_cia_ops, utils._is_preservable_cia_op, utils._get_decomp_for_cia


all_composites, is_preservable_composite, decomposition_of_composite = Internal[Any](
    "composite_operators",
    _find_composites,
    why="lists composite operators with their decompositions, including those of other libraries",
    fallback=(tuple, lambda operator: False, lambda operator: operator.decompose),
    cost="modules that call composite operators without a definition run in PyTorch",
    check=lambda part: not part[1](torch.ops.aten.add.Tensor) and callable(part[2](torch.ops.aten.matmul.default)),
).get()


enable_python_dispatcher: Any = required(
    "enable_python_dispatcher",
    lambda: importlib.import_module("torch._dispatch.python").enable_python_dispatcher,
    "decomposes composite operators on fake tensors",
    check=can_be_entered,
)


def _find_effect_tokens() -> tuple[Any, Any]:
    removal = importlib.import_module("torch.export._remove_effect_tokens_pass")
    return importlib.import_module("torch._higher_order_ops.effects").with_effects, removal._remove_effect_tokens


_WITH_EFFECTS, _REMOVE_EFFECT_TOKENS = Internal[Any](
    "effect_tokens",
    _find_effect_tokens,
    why="functionalization orders operators that check or print by tokens; a graph runs in order anyway",
    fallback=(None, None),
    cost="modules that call such operators run in PyTorch",
    check=lambda part: part[0].name() == "with_effects" and callable(part[1]),
).get()


def without_effect_tokens(program: ExportedProgram) -> ExportedProgram:
    """Replace the calls that functionalization ordered by tokens by calls without tokens."""
    modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    if _WITH_EFFECTS is None or not any(node.target is _WITH_EFFECTS for m in modules for node in m.graph.nodes):
        return program
    return _REMOVE_EFFECT_TOKENS(program)


# Python kernels


def _find_kernels() -> tuple[Any, Callable[[Any], Callable[..., Any]], Callable[[Any], None]]:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key, lambda op: op.py_kernels.get(key) or partial(op._op_dk, key), lambda op: op._dispatch_cache.clear()


def _finds_kernels(functions: tuple[Any, Callable[[Any], Callable[..., Any]], Callable[[Any], None]]) -> bool:
    linear = torch.ops.aten.linear.default
    functions[2](linear)
    return callable(functions[1](linear))


_KERNELS = Internal[Any](
    "composite_python_kernels",
    _find_kernels,
    why="computes the results of attention, linear and recurrent layers on fake tensors without decomposing them",
    fallback=None,
    cost="a capture takes up to twice as long, and recurrent layers specialize on the number of steps",
    check=_finds_kernels,
)


@contextmanager
def composite_kernel(operator: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace the kernel with which the Python dispatcher runs a composite operator, for all threads.

    Args:
        operator: an OpOverload.
        wrap: makes the new kernel from the current one.
    """
    if not _KERNELS.is_available:
        yield
        return
    key, kernel_of, clear_cache = _KERNELS.get()
    try:
        with entry_replaced(operator.py_kernels, key, wrap(kernel_of(operator))):
            clear_cache(operator)
            yield
    finally:
        clear_cache(operator)


def register_kernel(original: Callable[[Any, Any], Any], operator: Any, key: Any) -> Callable[[Any], Any]:
    """Return a decorator that registers a Python kernel of an operator, as `original` does.

    `original` first evaluates the annotations of the decorator, which takes most of its time.
    """
    if not _KERNELS.is_available or type(key) is not torch._C.DispatchKey or key == torch._C.DispatchKey.Python:
        return cast(Callable[[Any], Any], original(operator, key))
    clear_cache = _KERNELS.get()[2]

    def register(kernel: Any) -> Any:
        if key in operator.py_kernels:
            return original(operator, key)(kernel)  # raises
        operator.py_kernels[key] = kernel
        clear_cache(operator)
        return kernel

    return register


_composite_names: list[str] | None = None  # those that PyTorch last looked up


def list_composites_once(original: Callable[[], None]) -> Callable[[], None]:
    """Return a replacement of `original`, which looks up all composite operators in PyTorch's C++ registry by name.

    The replacement reads the registry once, and looks up its operators only if another call has not done so.
    """
    is_current = False

    def look_up() -> None:
        nonlocal is_current
        global _composite_names  # noqa: PLW0603  # the registry is global as well
        if is_current:
            return
        names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if names != _composite_names:
            original()
            _composite_names = names
        is_current = True

    return look_up


@contextmanager
def entry_replaced(table: Any, key: Any, value: Any) -> Iterator[None]:
    """Replace the value of a key of a dictionary inside the context."""
    before = table.get(key)
    table[key] = value
    try:
        yield
    finally:
        if before is None:
            del table[key]
        else:
            table[key] = before
