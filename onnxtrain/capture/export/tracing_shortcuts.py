"""Skip work of torch.export whose results are not used: half of its time.

* Arithmetic on symbolic sizes: fake tensors repeat the same few multiplications and comparisons, 23 000 in a T5 of six
  layers, of which 22 000 are repetitions. Their results are cached.
* PyTorch caches the results of operators by their arguments. With symbolic sizes, looking up and copying a result takes
  longer than computing it: without that cache, and with `meta_functions`, a small Llama is exported in half the time.
* Each node gets a full traceback as text. One line of it is read.
* Whether each result is contiguous, in three memory formats, is computed and stored with its node.
* The Python source of each graph module is generated and compiled after every change, and never run.
* All sizes and strides are searched for data-dependent symbols even if there are none: 4 % of the export of T5.
* The module names of each node are shortened node by node, though few differ: 4 %.
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
from onnxtrain.capture.export.meta_functions import fake_results
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
def cheap_tracing() -> Iterator[None]:
    """Skip this work on this thread. The capture lock must be held."""
    owner = threading.get_ident()
    with ExitStack() as stack:
        if lazy_module_class is not None:
            stack.enter_context(LAZY_MODULE_CLASS.replaced_in_thread(lazy_module_class))
            stack.enter_context(EXPORT_MODULE.replaced_in_thread(make_lazy_module))
        stack.enter_context(fake_tensor_cache_disabled())
        stack.enter_context(fake_results())
        if metadata_without_contiguity is not None:
            stack.enter_context(TENSOR_METADATA.replaced_in_thread(metadata_without_contiguity))
        stack.enter_context(CREATE_NODE.wrapped(partial(_with_one_line, owner)))
        stack.enter_context(WRAP_INT.wrapped(partial(_integers, owner)))
        stack.enter_context(UNBACKED_BINDINGS.wrapped(_where_any_are_data_dependent))
        stack.enter_context(EXPORT_PYTREE.wrapped(_with_short_names))
        results: dict[Any, SymNode] = {}
        for name, point in SIZE_ARITHMETIC.items():
            stack.enter_context(point.wrapped(partial(_remembered, owner, name, results)))
        yield


def _with_one_line(owner: int, original: Callable[..., Node]) -> Callable[..., Node]:
    """A tracer's `create_node` that records the user's innermost source line only."""

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


def _remembered(
    owner: int, name: str, results: dict[Any, SymNode], compute: Callable[[SymNode, SymNode], SymNode]
) -> Callable[[SymNode, SymNode], SymNode]:
    """An operation on two sizes that is computed once.

    Sharing a result is safe: it is immutable, and replacements of its symbols are looked up when it is read. In proxy
    mode it becomes a node of the graph; if it has one already, PyTorch adds another, which is dead. Such nodes are
    6 % of the export of a T5 of six layers.
    """
    multiplies = name == "mul"

    @wraps(compute)
    def operation(self: SymNode, other: SymNode) -> SymNode:
        if threading.get_ident() != owner:
            return compute(self, other)
        hints = hint_of(self), hint_of(other)
        if type(hints[0]) is not int or type(hints[1]) is not int:  # data-dependent, or a float or bool
            return compute(self, other)
        mode = proxy_tensor.get_proxy_mode()
        expressions = node_expression(self), node_expression(other)
        if mode is not None and multiplies and 1 in expressions:
            return compute(self, other)  # gives the other operand itself
        key = (name, id(self.shape_env), *expressions, *hints)
        result = results.get(key)
        if result is None or (mode is not None and result not in _nodes_of(mode)):
            result = compute(self, other)
            if mode is None:
                results[key] = result
        return result

    return operation


def _nodes_of(mode: proxy_tensor.ProxyTorchDispatchMode) -> Container[SymNode]:
    """The sizes that have a node in the graph being traced."""
    found: Container[SymNode] = getattr(mode.tracer.symnode_tracker, "sym_node_dict", ())
    return found


def _integers(owner: int, wrap: Callable[[SymNode, int], SymNode]) -> Callable[[SymNode, int], SymNode]:
    """A `SymNode.wrap_int` that makes one node for each integer: a node is never changed."""
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


def _where_any_are_data_dependent(original: Callable[[GraphModule], None]) -> Callable[[GraphModule], None]:
    """A `_replace_unbacked_bindings` that searches only where there are data-dependent sizes, on this thread."""

    def replace(module: GraphModule) -> None:
        if has_data_dependent_sizes(module):
            return original(module)
        for node in module.graph.nodes:
            node.meta.pop("unbacked_bindings", None)
        return None

    return in_thread(replace, original)


def _with_short_names(trees: Any) -> SimpleNamespace:
    """The module of pytrees with a `tree_map` that remembers short names, on this thread."""
    return SimpleNamespace(**{**vars(trees), "tree_map": in_thread(_mapped(trees.tree_map), trees.tree_map)})


def _mapped(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `tree_map` that caches its results for dictionaries of tuples of strings."""
    known: dict[Any, dict[Any, Any]] = {}

    @wraps(original)
    def tree_map(function: Callable[..., Any], tree: Any, *rests: Any, **options: Any) -> Any:
        if type(tree) is not dict or rests or options or not all(map(_is_of_texts, tree.values())):
            return original(function, tree, *rests, **options)
        key = (function, *tree.items())
        if key not in known:
            known[key] = original(function, tree)
        return dict(known[key])

    return tree_map


def _is_of_texts(value: Any) -> bool:
    return type(value) is tuple and all(type(part) is str for part in value)
