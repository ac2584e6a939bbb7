"""Skip work of torch.export whose results onnxtrain does not use. It takes half of the export's time.

* Fake tensors repeat the same few multiplications and comparisons of symbolic sizes: of 23 000 in a T5 of six layers,
  22 000 are repetitions. Their results are cached.
* PyTorch caches the results of operators by their arguments. With symbolic sizes, looking up and copying a result takes
  longer than computing it: without that cache, and with `meta_functions`, a small Llama is exported in half the time.
* PyTorch formats a full traceback for each node. onnxtrain reads one line of it.
* PyTorch computes whether each result is contiguous, in three memory formats, and stores it with the node.
* PyTorch generates and compiles the Python source of each graph module after every change. It never runs.
* PyTorch searches all sizes and strides for data-dependent symbols even if there are none: 4 % of the export of T5.
* PyTorch shortens the module names node by node, though few differ: 4 %.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.proxy import TracerBase

from onnxtrain.capture import source_location
from onnxtrain.capture.export.meta_functions import fast_meta_functions
from onnxtrain.torch_compat.patch_points import (
    CREATE_NODE,
    EXPORT_MODULE,
    EXPORT_PYTREE,
    LAZY_MODULE_CLASS,
    SIZE_ARITHMETIC,
    TENSOR_METADATA,
    UNBACKED_BINDINGS,
    WRAP_INT,
)
from onnxtrain.torch_compat.replacement import in_thread
from onnxtrain.torch_compat.symbols import hint_of, node_expression
from onnxtrain.torch_compat.tracing import (
    fake_tensor_cache_disabled,
    has_data_dependent_sizes,
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
        stack.enter_context(WRAP_INT.wrapped(partial(_cached_integers, owner)))
        stack.enter_context(UNBACKED_BINDINGS.wrapped(_skip_without_data_dependent_sizes))
        stack.enter_context(EXPORT_PYTREE.wrapped(_with_cached_tree_map))
        results: dict[Any, SymNode] = {}
        for name, point in SIZE_ARITHMETIC.items():
            stack.enter_context(point.wrapped(partial(_cached_operation, owner, name, results)))
        yield


def _with_source_line(owner: int, original: Callable[..., Node]) -> Callable[..., Node]:
    """Make a tracer's `create_node` that records only the user's innermost source line."""

    @wraps(original)
    def create_node(self: TracerBase, *args: Any, **kwargs: Any) -> Node:
        if threading.get_ident() != owner:
            return original(self, *args, **kwargs)
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


def _cached_integers(owner: int, wrap: Callable[[SymNode, int], SymNode]) -> Callable[[SymNode, int], SymNode]:
    """Make a `SymNode.wrap_int` that returns one shared node per integer: nodes are immutable."""
    nodes: dict[tuple[int, int], SymNode] = {}

    @wraps(wrap)
    def wrap_int(self: SymNode, value: int) -> SymNode:
        if threading.get_ident() != owner:
            return wrap(self, value)
        node = nodes.get((id(self.shape_env), value))
        if node is None:
            node = nodes[id(self.shape_env), value] = wrap(self, value)
        return node

    return wrap_int


def _skip_without_data_dependent_sizes(original: Callable[[GraphModule], None]) -> Callable[[GraphModule], None]:
    """Make a `_replace_unbacked_bindings` that, on this thread, searches only graphs with data-dependent sizes."""

    def replace(module: GraphModule) -> None:
        if has_data_dependent_sizes(module):
            return original(module)
        for node in module.graph.nodes:
            node.meta.pop("unbacked_bindings", None)
        return None

    return in_thread(replace, original)


def _with_cached_tree_map(trees: Any) -> SimpleNamespace:
    """Copy PyTorch's pytree module, with a `tree_map` that caches the shortened module names on this thread."""
    return SimpleNamespace(**{**vars(trees), "tree_map": in_thread(_cached_tree_map(trees.tree_map), trees.tree_map)})


def _cached_tree_map(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a `tree_map` that caches its results for dictionaries of tuples of strings."""
    results: dict[Any, dict[Any, Any]] = {}

    @wraps(original)
    def tree_map(function: Callable[..., Any], tree: Any, *rests: Any, **options: Any) -> Any:
        if type(tree) is not dict or rests or options or not all(map(_is_tuple_of_strings, tree.values())):
            return original(function, tree, *rests, **options)
        key = (function, *tree.items())
        if key not in results:
            results[key] = original(function, tree)
        return dict(results[key])

    return tree_map


def _is_tuple_of_strings(value: Any) -> bool:
    return type(value) is tuple and all(type(part) is str for part in value)
