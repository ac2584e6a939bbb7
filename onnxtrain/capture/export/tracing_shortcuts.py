"""Skip work of torch.export whose results onnxtrain does not use.

The percentages are of a first step without the shortcut (docs/development/architecture.md).

* 18 % of a ResNet of 20 layers, 14 % of a MiniLM: PyTorch formats a full traceback for each node. onnxtrain reads one
  line of it.
* 17 % of a ResNet: fake tensors repeat the same few multiplications and comparisons of symbolic sizes. Their results
  are cached.
* 13 % of a ResNet, 12 % of a MiniLM: PyTorch computes whether each result is contiguous, in three memory formats, and
  stores it with the node.
* 12 % of a ResNet: PyTorch generates and compiles the Python source of each graph module after every change. It never
  runs.
* 10 % of a ResNet: PyTorch caches the results of operators by their arguments. With symbolic sizes, looking up and
  copying a result takes longer than computing it.
* 20 % of a module of two operators, in a process that has made a capture: PyTorch solves the inequalities between
  sizes, to suggest ranges of named dimensions in errors.

In a first step that functionalizes (the running statistics of an instance norm):

* 10 %: PyTorch lists all composite operators once for each namespace of operators, and looks up each by name.
* 8 %: PyTorch replaces their kernels, and its function that registers one evaluates annotations.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

from torch.fx import Node
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.proxy import TracerBase

from onnxtrain.capture import source_location
from onnxtrain.capture.export.meta_functions import fast_meta_functions
from onnxtrain.system.time_limit import check_time
from onnxtrain.torch_compat.decompositions import list_composites_once, register_kernel
from onnxtrain.torch_compat.patch_points import (
    CREATE_NODE,
    EXPORT_MODULE,
    LAZY_MODULE_CLASS,
    LIST_COMPOSITES,
    REGISTER_KERNEL,
    SIZE_ARITHMETIC,
    SOLVE_CONSTRAINTS,
    TENSOR_METADATA,
)
from onnxtrain.torch_compat.symbols import hint_of, node_expression
from onnxtrain.torch_compat.tracing import (
    fake_tensor_cache_disabled,
    lazy_module_class,
    make_lazy_module,
    metadata_without_contiguity,
)


@contextmanager
def tracing_shortcuts() -> Iterator[None]:
    """Skip this work on this thread. The caller must hold the capture lock."""
    owner = threading.get_ident()
    with ExitStack() as stack:
        if lazy_module_class is not None:
            stack.enter_context(LAZY_MODULE_CLASS.replaced_in_thread(lazy_module_class))
            stack.enter_context(EXPORT_MODULE.replaced_in_thread(make_lazy_module))
        stack.enter_context(fake_tensor_cache_disabled())
        stack.enter_context(fast_meta_functions())
        if metadata_without_contiguity is not None:
            stack.enter_context(TENSOR_METADATA.replaced_in_thread(metadata_without_contiguity))
        stack.enter_context(CREATE_NODE.wrapped(partial(_with_source_line, owner)))
        stack.enter_context(SOLVE_CONSTRAINTS.replaced_in_thread(partial(_solve_equations, SOLVE_CONSTRAINTS.original)))
        stack.enter_context(REGISTER_KERNEL.replaced_in_thread(partial(register_kernel, REGISTER_KERNEL.original)))
        stack.enter_context(LIST_COMPOSITES.replaced_in_thread(list_composites_once(LIST_COMPOSITES.original)))
        results: dict[Any, SymNode] = {}
        for name, point in SIZE_ARITHMETIC.items():
            stack.enter_context(point.wrapped(partial(_cached_operation, owner, name, results)))
        yield


def _solve_equations(solve: Callable[[Any], None], constraints: Any) -> None:
    """Solve constraints on sizes, but skip inequalities if there are no equations.

    Their solutions only become sentences of an error about named dimensions. With an equation among the constraints,
    they can also contradict it.
    """
    if not getattr(constraints, "_symbols_with_equalities", True):
        constraints._univariate_inequalities = {}
    solve(constraints)


def _with_source_line(owner: int, original: Callable[..., Node]) -> Callable[..., Node]:
    """Make a tracer's `create_node` that records only the user's innermost source line."""

    @wraps(original)
    def create_node(self: TracerBase, *args: Any, **kwargs: Any) -> Node:
        if threading.get_ident() != owner:
            return original(self, *args, **kwargs)
        check_time()
        recording, self.record_stack_traces = self.record_stack_traces, False
        try:
            node = original(self, *args, **kwargs)
        finally:
            self.record_stack_traces = recording
        if recording and not node.stack_trace:
            node.stack_trace = source_location.stack_trace(sys._getframe(1))
        return node

    return create_node


def _cached_operation(
    owner: int, name: str, results: dict[Any, SymNode], compute: Callable[[SymNode, SymNode], SymNode]
) -> Callable[[SymNode, SymNode], SymNode]:
    """Make an operation on two sizes that caches its results.

    Sharing a result is safe: it is immutable, and PyTorch looks up replacements of its symbols when it is read. In
    proxy mode an operation adds a node to the graph, which is dead if the result has one already. Such nodes are 6 %
    of the export of a T5 of six layers.
    """
    is_multiplication = name == "mul"

    @wraps(compute)
    def operation(self: SymNode, other: SymNode) -> SymNode:
        if threading.get_ident() != owner:
            return compute(self, other)
        hints = hint_of(self), hint_of(other)
        if type(hints[0]) is not int or type(hints[1]) is not int:  # data-dependent, or a float or bool
            return compute(self, other)
        mode = proxy_tensor.get_proxy_mode()
        expressions = node_expression(self), node_expression(other)
        if mode is not None and is_multiplication and 1 in expressions:
            return compute(self, other)  # returns the other operand itself
        key = (name, id(self.shape_env), *expressions, *hints)
        result = results.get(key)
        if result is None or (mode is not None and result not in _nodes_of(mode)):
            result = compute(self, other)
            if mode is None:
                results[key] = result
        return result

    return operation


def _nodes_of(mode: proxy_tensor.ProxyTorchDispatchMode) -> Container[SymNode]:
    """Return the sizes that have a node in the graph being traced."""
    sizes: Container[SymNode] = getattr(mode.tracer.symnode_tracker, "sym_node_dict", ())
    return sizes
