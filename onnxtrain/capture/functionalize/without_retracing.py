"""Functionalize simple exports without tracing them again, as `run_decompositions` does.

    wrap_with_set_grad_enabled(False, body, x)  ──>  the calls of body, whose results are detached already
    rows = zeros[1:];  rows.copy_(x)            ──>  new = copy(rows, x);  zeros = slice_scatter(zeros, new, 1:)
    seen.add_(1)                                ──>  new = add(seen, 1), an output that is written to the buffer `seen`
    batch_norm(x, w, b, mean, var, True, …)     ──>  y, _, _, mean, var = _native_batch_norm_legit_functional(…)
    linear(x, w), under autocast                ──>  linear(_to_copy(x, …), _to_copy(w, …))

A write must go to a tensor that forward itself created or to a buffer, directly or through slices and reshapes. The
storages of the fake tensors tell which values share memory. Any other export is left to PyTorch's functionalization,
whose second trace took 0.8 s of the 1.3 s of a ResNet of 20 layers.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from onnxtrain.capture.export.meta_functions import fast_meta_functions
from onnxtrain.capture.functionalize.autocast import composites_with_casts
from onnxtrain.capture.functionalize.batch_norm import BATCH_NORM, functional_batch_norm, updates_statistics
from onnxtrain.capture.functionalize.explicit_casts import CAST, ExplicitCasts, cast_value
from onnxtrain.capture.functionalize.functional_calls import is_convertible
from onnxtrain.capture.node_storage import storages_of
from onnxtrain.errors import CaptureError
from onnxtrain.ops import FROM_TORCH
from onnxtrain.ops.aten_node import autocast_state
from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.modes import is_transformed
from onnxtrain.torch_compat.operators import OpOverload, schema_of

aten = torch.ops.aten

# From a view operator to the one that writes the view back into its base, with the same arguments after the tensors.
_SCATTER_OF_VIEW: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}
_RESHAPES = (aten.view.default, aten.reshape.default)


def make_convertible(program: ExportedProgram) -> bool:
    """Rewrite the graph of `program`, if that is possible without tracing it again, so that it can be converted.

    Returns:
        Whether `program` can now be converted. If not, it is unchanged.
    """
    if is_convertible(program):
        return True
    module = program.graph_module
    before = module.graph
    buffers = {s.arg.name: s.target for s in program.graph_signature.input_specs if s.kind == InputKind.BUFFER}
    try:
        if composites_with_casts(program):
            return False
        with fast_meta_functions():
            rewrite = _Rewrite(before, buffers)
    except (_NeedsRetracingError, CaptureError):
        return False
    module.graph = rewrite.graph
    if is_convertible(program, with_casts=True):
        program.graph_signature.output_specs[:0] = rewrite.mutations
        return True
    module.graph = before
    return False


class _NeedsRetracingError(Exception):
    """The graph has something that only PyTorch's functionalization can rewrite."""


class _Rewrite:
    """A functional copy of a graph.

    Args:
        graph: the graph to copy.
        buffers: for each placeholder that is a buffer, its name in the export's signature.

    Attributes:
        graph: the copy. The new values of buffers come first among its outputs.
        mutations: the specifications of these outputs.

    Raises:
        _NeedsRetracingError: a call writes to a tensor that is not a buffer and that forward did not create; a written
            value is read through another view later; or there is a region that is not `torch.no_grad()`.
    """

    def __init__(self, graph: Graph, buffers: Mapping[str, str | None]) -> None:
        self.graph = Graph(graph.owning_module)
        self.mutations: list[OutputSpec] = []
        self._buffers = buffers
        self._written_buffers: set[Node] = set()
        self._current: dict[Node, Node] = {}  # for each node, its current value in the copy
        self._alias_of: dict[Node, Node] = {}  # for a result that is another node's tensor, that node
        self._by_storage: dict[int, list[Node]] = defaultdict(list)  # for each storage, the nodes of its tensors
        self._stale: set[Node] = set()  # nodes whose memory was written through another node
        self._regions: dict[Node, Any] = {}  # for each region, its results
        self._casts = ExplicitCasts(autocast_state())
        self._has_writes = any(map(_is_write, graph.nodes))
        for node in graph.nodes:
            self._visit(node)

    def _visit(self, node: Node) -> None:
        if node.op == "get_attr":
            return  # the body of a region
        if _is_grad_mode_region(node) and not node.args[0]:
            self._inline(node)
        elif node.target is operator.getitem and node.args[0] in self._regions:
            self._alias_of[node] = self._regions[node.args[0]][node.args[1]]  # type: ignore[index]  # a Node and an int
        elif node.target is BATCH_NORM:
            self._batch_norm(node)
        elif _is_write(node):
            self._write(node)
        elif node.op == "output":
            self._output(node)
        else:
            self._set_new(node, self._copy(node))

    def _copy(self, node: Node) -> Node:
        """Copy a call, with its arguments cast as autocast casts them."""
        casts = self._casts.before(node)
        if casts is None:
            raise _NeedsRetracingError
        if not casts:
            return self.graph.node_copy(node, self._value)
        arguments: list[Node] = []
        map_arg((node.args, node.kwargs), arguments.append)
        cast = {position: self._cast(arguments[position], dtype, node) for position, dtype in casts}
        positions = iter(range(len(arguments)))
        mapped: Any = map_arg((node.args, node.kwargs), lambda a: cast.get(next(positions)) or self._value(a))
        call = self.graph.create_node("call_function", node.target, mapped[0], mapped[1], node.name)
        call.meta = dict(node.meta)
        return call

    def _cast(self, argument: Node, dtype: torch.dtype, origin: Node) -> Node:
        return self._call(CAST, (argument,), {"dtype": dtype}, cast_value(argument.meta["val"], dtype), origin)

    def _set_new(self, node: Node, value: Node) -> None:
        """Record the value of a node whose tensor is not another node's."""
        self._current[node] = value
        for storage in _storages(node):
            self._by_storage[storage].append(node)

    def _resolve(self, node: Node) -> Node:
        """Return the node whose tensor this node's is."""
        while node in self._alias_of:
            node = self._alias_of[node]
        return node

    def _value(self, node: Node) -> Node:
        node = self._resolve(node)
        if node in self._stale or node not in self._current:
            raise _NeedsRetracingError
        return self._current[node]

    def _inline(self, node: Node) -> None:
        """Visit the calls of a region, if neither the region nor the graph around it writes to tensors."""
        body = getattr(self.graph.owning_module, str(node.args[1].target)).graph  # type: ignore[union-attr]  # a Node
        if self._has_writes or any(n.op == "get_attr" or _is_write(n) for n in body.nodes):
            raise _NeedsRetracingError
        arguments = iter(node.args[2:])
        for inner in body.nodes:
            if inner.op == "placeholder":
                self._alias_of[inner] = next(arguments)  # type: ignore[assignment]  # regions take nodes
            elif inner.op == "output":
                self._regions[node] = inner.args[0]
            else:
                self._visit(inner)

    def _write(self, node: Node) -> None:
        """Visit an operator that writes to its first argument, and returns it."""
        if not isinstance(node.args[0], Node):
            raise _NeedsRetracingError
        self._alias_of[node] = written = self._resolve(node.args[0])
        value = self._call(_functional_operator(node), node.args, node.kwargs, written.meta["val"], node)
        self._overwrite(written, value, node)

    def _batch_norm(self, node: Node) -> None:
        """Visit a batch norm, and update its running statistics if it does."""
        functional = functional_batch_norm(node)
        if functional is None:
            raise _NeedsRetracingError
        call = self._call(functional.target, functional.arguments, {}, functional.results, node)
        self._set_new(node, self._get_result(call, 0, node))
        for index, statistic in functional.updates:
            self._overwrite(self._resolve(statistic), self._get_result(call, index, node), node)

    def _overwrite(self, written: Node, value: Node, origin: Node) -> None:
        """Replace the value of a node, and of the tensors that it is a view of, for all later reads."""
        storages = _storages(written)
        if len(storages) != 1 or written in self._stale:
            raise _NeedsRetracingError
        base, *others = self._by_storage[storages[0]]
        self._current[written] = value
        path = {written}
        while written is not base:
            view, written = written, self._resolve(written.all_input_nodes[0])
            value = self._written_through(view, written, origin)
            self._current[written] = value
            path.add(written)
        if not isinstance(base.meta.get("val"), torch.Tensor):
            raise _NeedsRetracingError
        if base.op == "placeholder":
            if base.name not in self._buffers or any(other.op == "placeholder" for other in others):
                raise _NeedsRetracingError
            self._written_buffers.add(base)
        elif base.op != "call_function":
            raise _NeedsRetracingError
        self._stale.update(other for other in others if other not in path)

    def _written_through(self, view: Node, viewed: Node, origin: Node) -> Node:
        """Return the new value of a tensor from that of a view of it."""
        result = viewed.meta["val"]
        if view.target in _SCATTER_OF_VIEW:
            arguments = (viewed, view, *view.args[1:])
            return self._call(_SCATTER_OF_VIEW[view.target], arguments, view.kwargs, result, origin)
        if view.target in _RESHAPES:
            return self._call(aten.reshape_as.default, (view, viewed), {}, result, origin)
        raise _NeedsRetracingError

    def _output(self, node: Node) -> None:
        """Output the new values of buffers, in the buffers' order, then forward's results, none of them a buffer."""
        written = [buffer for buffer in self._current if buffer in self._written_buffers]
        storages = {storage for buffer in written for storage in _storages(buffer)}
        if any(not storages.isdisjoint(_storages(result)) for result in node.all_input_nodes):
            raise _NeedsRetracingError
        values = [self._current[buffer] for buffer in written]
        for buffer, value in zip(written, values, strict=True):
            argument, target = TensorArgument(name=value.name), self._buffers[buffer.name]
            self.mutations.append(OutputSpec(OutputKind.BUFFER_MUTATION, argument, target))
        results: Any = map_arg(node.args[0], self._value)
        self.graph.output((*values, *results)).meta = dict(node.meta)

    def _get_result(self, call: Node, index: int, origin: Node) -> Node:
        result = self.graph.call_function(operator.getitem, (call, index))
        result.meta = {**origin.meta, "val": call.meta["val"][index]}
        return result

    def _call(self, target: Any, args: Any, kwargs: Any, result: Any, origin: Node) -> Node:
        """Add a call with the fake result `result`, at the source location of `origin`."""
        mapped: Any = map_arg((args, kwargs), self._value)
        call = self.graph.create_node("call_function", target, mapped[0], mapped[1], target.overloadpacket.__name__)
        call.meta = {**origin.meta, "val": result}
        return call


def _is_write(node: Node) -> bool:
    target = node.target
    return (isinstance(target, OpOverload) and schema_of(target).is_mutable) or updates_statistics(node)


def _storages(node: Node) -> list[int]:
    """Return the storages of a node's tensors.

    Raises:
        _NeedsRetracingError: the node is inside `torch.vmap` or `torch.func`, whose tensors have no storage.
    """
    leaves = pytree.tree_leaves(node.meta.get("val"))
    tensors = [v for v in leaves if isinstance(v, torch.Tensor) and v.layout is torch.strided]
    if any(is_transformed(t) for t in tensors):
        raise _NeedsRetracingError
    return [*storages_of(node)]


def _signature(operator: Any) -> list[tuple[str, str, bool]]:
    return [(a.name, str(a.type), a.kwarg_only) for a in schema_of(operator).arguments]


def _functional_operator(node: Node) -> Any:
    """Return the operator that computes what an in-place one writes to its first argument.

    Raises:
        _NeedsRetracingError: no such operator has an ONNX definition, or its result has another dtype.
    """
    target: Any = node.target
    writes = [a.alias_info is not None and a.alias_info.is_write for a in schema_of(target).arguments]
    namespace, _, name = schema_of(target).name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    # Overload names are not enough: the scalar of pow_.Scalar is the exponent, that of pow.Scalar the base.
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    functional: Any = next((o for o in overloads if _signature(o) == _signature(target)), None)
    if not name.endswith("_") or str(functional) not in FROM_TORCH or writes != [True] + [False] * (len(writes) - 1):
        raise _NeedsRetracingError
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise _NeedsRetracingError
    if functional is aten.copy.default:  # casts to the dtype of its first argument
        return functional
    values: Any = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = values
    mode = args[0].fake_mode
    with mode, mode.shape_env.suppress_guards(), mode.shape_env.ignore_fresh_unbacked_symbols():
        try:
            result = functional(*args, **kwargs)
        except RuntimeError as error:  # the functional operator lacks a kernel for symbolic sizes
            raise _NeedsRetracingError from error
        if result.dtype != args[0].dtype:
            raise _NeedsRetracingError
    return functional


def _is_grad_mode_region(node: Node) -> bool:
    """Return whether a node is a region of `torch.no_grad()` or `torch.enable_grad()`."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled"
