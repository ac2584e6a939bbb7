"""PyTorch's tracing without work that nobody reads: half of torch.export's time.

* Arithmetic of open sizes: each fake tensor asks anew for the same few products and comparisons, 23 000 times in a T5
  of six layers, 22 000 of them not for the first time. They are remembered.
* Results of operators are kept by their arguments. Where sizes are symbols it takes longer to find and to copy one than
  to compute it: without that, and with the rules of `fake_results`, a small Llama is exported in half the time.
* Every node gets a traceback as text, with the source lines of all its frames: we read one line of it.
* Whether a result is contiguous in one of three orders is asked for each node, and written beside it.
* The Python source of each graph module is written and compiled anew for every change, and never run.
* The sizes and strides of all results are searched for symbols of unknown value where there are none: 4 % of T5's.
* Names in the modules around each node are shortened node by node, which is the same few again: 4 %.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

from torch._dynamo import config as dynamo_config
from torch._export.utils import _get_shape_env_from_gm
from torch.export import _trace, exported_program
from torch.fx import GraphModule, Node, _lazy_graph_module
from torch.fx._lazy_graph_module import _LazyGraphModule, _make_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.fx.proxy import TracerBase
from torch.utils import _pytree as pytree
from torch.utils._sympy.symbol import SymT, symbol_is_type

from onnxtrain.capture import source_line
from onnxtrain.capture.export.meta_functions import fake_results
from onnxtrain.torch_compat.replacement import in_thread, replaced, replaced_in_thread

_ARITHMETIC = ("add", "sub", "mul", "mod", "int_floordiv", "eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min")
_UNKNOWN = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)


@contextmanager
def cheap_tracing() -> Iterator[None]:
    """Holds the shortcuts, for this thread. The capture lock must be held."""
    owner = threading.get_ident()
    metadata = partial(_extract_tensor_metadata, include_contiguity=False)
    with ExitStack() as stack:
        lazy = lambda: _LazyGraphModule
        stack.enter_context(replaced_in_thread(_lazy_graph_module, "_get_graph_module_cls", lazy))
        stack.enter_context(dynamo_config.patch(fake_tensor_cache_enabled=False))
        stack.enter_context(fake_results())
        stack.enter_context(replaced_in_thread(proxy_tensor, "_extract_tensor_metadata", metadata))
        stack.enter_context(replaced(TracerBase, "create_node", _with_one_line(TracerBase.create_node, owner)))
        stack.enter_context(replaced(SymNode, "wrap_int", _numbers(SymNode.wrap_int, owner)))
        stack.enter_context(replaced_in_thread(exported_program, "_create_graph_module_for_export", _make_graph_module))
        bindings = _trace._replace_unbacked_bindings
        stack.enter_context(
            replaced(_trace, "_replace_unbacked_bindings", in_thread(_where_any_are_unknown(bindings), bindings))
        )
        trees = SimpleNamespace(**{**vars(pytree), "tree_map": in_thread(_mapped(pytree.tree_map), pytree.tree_map)})
        stack.enter_context(replaced(_trace, "pytree", trees))
        known: dict[Any, SymNode] = {}
        for name in _ARITHMETIC:
            compute = getattr(SymNode, f"_{name}")
            stack.enter_context(replaced(SymNode, f"_{name}", _remembered(name, compute, known, owner)))
        yield


def _with_one_line(original: Callable[..., Node], owner: int) -> Callable[..., Node]:
    """A tracer's `create_node` that notes the user's innermost line alone."""

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
            node.stack_trace = source_line.as_text(sys._getframe(1))
        return node

    return create_node


def _remembered(
    name: str, compute: Callable[[SymNode, SymNode], SymNode], known: dict[Any, SymNode], owner: int
) -> Callable[[SymNode, SymNode], SymNode]:
    """An operation on two sizes that is computed once.

    One result may serve many: it is never changed, and what its symbols are replaced by is looked up when it is read.
    In proxy mode it becomes a node of the graph. Where the result has one already, PyTorch makes another that nobody
    reads: that and its like are 6 % of the export of a T5 of six layers.
    """
    multiplies = name == "mul"

    @wraps(compute)
    def operation(self: SymNode, other: SymNode) -> SymNode:
        if threading.get_ident() != owner:
            return compute(self, other)
        hints = self._hint, other._hint
        if type(hints[0]) is not int or type(hints[1]) is not int:  # of unknown size, or no size
            return compute(self, other)
        mode = proxy_tensor.get_proxy_mode()
        if mode is not None and multiplies and (self._expr == 1 or other._expr == 1):
            return compute(self, other)  # gives the other operand itself
        key = (name, id(self.shape_env), self._expr, other._expr, *hints)
        found = known.get(key)
        if found is None or (mode is not None and found not in _nodes_of(mode)):
            found = compute(self, other)
            if mode is None:
                known[key] = found
        return found

    return operation


def _nodes_of(mode: proxy_tensor.ProxyTorchDispatchMode) -> Container[SymNode]:
    """The sizes that have a node in the graph that is traced."""
    found: Container[SymNode] = getattr(mode.tracer.symnode_tracker, "sym_node_dict", ())
    return found


def _numbers(wrap: Callable[[SymNode, int], SymNode], owner: int) -> Callable[[SymNode, int], SymNode]:
    """Numbers as nodes, one for each: a node is never changed."""
    known: dict[tuple[int, int], SymNode] = {}

    @wraps(wrap)
    def number(self: SymNode, value: int) -> SymNode:
        if threading.get_ident() != owner:
            return wrap(self, value)
        found = known.get((id(self.shape_env), value))
        if found is None:
            found = known[id(self.shape_env), value] = wrap(self, value)
        return found

    return number


def _where_any_are_unknown(original: Callable[[GraphModule], None]) -> Callable[[GraphModule], None]:
    """A `_replace_unbacked_bindings` that searches where there is a symbol of unknown value."""

    @wraps(original)
    def replace(module: GraphModule) -> None:
        sizes = _get_shape_env_from_gm(module)
        if sizes is None or any(symbol_is_type(s, _UNKNOWN) for s in sizes.var_to_range):
            return original(module)
        for node in module.graph.nodes:
            node.meta.pop("unbacked_bindings", None)
        return None

    return replace


def _mapped(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `tree_map` that remembers what became of a dictionary of tuples of texts."""
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
