"""Makes an export functional where that is plain, without tracing it once more (`run_decompositions` takes seconds).

    wrap_with_set_grad_enabled(False, body, x)  ──>  the calls of body; what leaves it is marked with `detach` already
    rows = zeros[1:];  rows.copy_(x)            ──>  new = copy(rows, x);  zeros = slice_scatter(zeros, new, 1:)
    seen.add_(1)                                ──>  new = add(seen, 1), a result that is written to the buffer `seen`
    batch_norm(x, w, b, mean, var, True, …)     ──>  y, _, _, mean, var = _native_batch_norm_legit_functional(…)
    linear(x, w), under autocast                ──>  linear(_to_copy(x, …), _to_copy(w, …))

What is written has to be a tensor that forward itself made, or a buffer, as it is or through slices. Which values share
memory is asked of the fake tensors. Whatever is less plain is left to PyTorch. Of a ResNet of 20 layers the second
trace took 0.8 s of 1.3.
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

from onnxtrain.capture.export.meta_functions import fake_results
from onnxtrain.capture.functionalize.autocast import casting_composites
from onnxtrain.capture.functionalize.batch_norm import BATCH_NORM, functional_batch_norm, updates_statistics
from onnxtrain.capture.functionalize.explicit_casts import CAST, ExplicitCasts, cast_value
from onnxtrain.capture.functionalize.functional_calls import is_convertible
from onnxtrain.errors import CaptureError
from onnxtrain.ops import FROM_TORCH
from onnxtrain.ops.aten_node import autocast_state
from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.modes import is_transformed
from onnxtrain.torch_compat.operators import OpOverload, schema_of
from onnxtrain.torch_compat.patch_points import RECOMPILE
from onnxtrain.torch_compat.tensors import storage_id

aten = torch.ops.aten

# For a view, what writes it back into the whole; both take the same arguments after their tensors.
_WRITTEN_BACK: dict[Any, Any] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}


def make_convertible(program: ExportedProgram) -> bool:
    """Whether `program` can be converted without functionalization; rewrites its graph so, where that is plain."""
    if is_convertible(program):
        return True
    module = program.graph_module
    before = module.graph
    buffers = {s.arg.name: s.target for s in program.graph_signature.input_specs if s.kind == InputKind.BUFFER}
    try:
        if casting_composites(program):
            return False
        with fake_results():
            rewrite = _Rewrite(before, buffers)
    except (_NotPlainError, CaptureError):
        return False
    with RECOMPILE.replaced_in_thread(lambda module: None):  # only the graph is read
        module.graph = rewrite.graph
    if is_convertible(program, with_casts=True):
        program.graph_signature.output_specs[:0] = rewrite.mutations
        return True
    module.graph = before
    return False


class _NotPlainError(Exception):
    """Something that is left to PyTorch's functionalization."""


class _Rewrite:
    """A functional copy of a graph.

    Attributes:
        graph: the copy.
        mutations: what those of its outputs are that come before the others: the new values of buffers.

    Raises:
        _NotPlainError: a call writes to something that is no buffer and that forward did not make, or what it writes is
            read through another view later; or there is a region that is no `torch.no_grad()`.
    """

    def __init__(self, graph: Graph, buffers: Mapping[str, str | None]) -> None:
        self.graph = Graph(graph.owning_module)
        self.mutations: list[OutputSpec] = []
        self._buffers = buffers  # by the names of their nodes, what the export's signature calls them
        self._written: set[Node] = set()  # the buffers that are written
        self._now: dict[Node, Node] = {}  # for each node, its value as it is now
        self._same: dict[Node, Node] = {}  # for a result that is another node's tensor, that node
        self._sharing: dict[int, list[Node]] = defaultdict(list)  # for each storage, the nodes whose tensors lie there
        self._old: set[Node] = set()  # those of them whose value was written over through another
        self._regions: dict[Node, Any] = {}  # for each region, its results
        self._casts = ExplicitCasts(autocast_state())
        self._has_writes = any(map(_writes, graph.nodes))
        for node in graph.nodes:
            self._visit(node)

    def _visit(self, node: Node) -> None:
        if node.op == "get_attr":
            return  # the body of a region
        if _is_grad_mode_region(node) and not node.args[0]:
            self._inline(node)
        elif node.target is operator.getitem and node.args[0] in self._regions:
            self._same[node] = self._regions[node.args[0]][node.args[1]]  # type: ignore[index]  # a Node and an int
        elif node.target is BATCH_NORM:
            self._batch_norm(node)
        elif _writes(node):
            self._write(node)
        elif node.op == "output":
            self._output(node)
        else:
            self._made(node, self._copy(node))

    def _copy(self, node: Node) -> Node:
        """The same call, of arguments that are cast where autocast casts them."""
        casts = self._casts.before(node)
        if casts is None:
            raise _NotPlainError
        if not casts:
            return self.graph.node_copy(node, self._value)
        arguments: list[Node] = []
        map_arg((node.args, node.kwargs), arguments.append)
        cast = {place: self._cast(arguments[place], dtype, node) for place, dtype in casts}
        places = iter(range(len(arguments)))
        given: Any = map_arg((node.args, node.kwargs), lambda a: cast.get(next(places)) or self._value(a))
        call = self.graph.create_node("call_function", node.target, given[0], given[1], node.name)
        call.meta = dict(node.meta)
        return call

    def _cast(self, argument: Node, dtype: torch.dtype, origin: Node) -> Node:
        return self._call(CAST, (argument,), {"dtype": dtype}, cast_value(argument.meta["val"], dtype), origin)

    def _made(self, node: Node, value: Node) -> None:
        self._now[node] = value
        for storage in _storages(node):
            self._sharing[storage].append(node)

    def _itself(self, node: Node) -> Node:
        while node in self._same:
            node = self._same[node]
        return node

    def _value(self, node: Node) -> Node:
        node = self._itself(node)
        if node in self._old or node not in self._now:
            raise _NotPlainError
        return self._now[node]

    def _inline(self, node: Node) -> None:
        """Visits the calls of a region. It changes nothing, and nothing is changed around it."""
        body = getattr(self.graph.owning_module, str(node.args[1].target)).graph  # type: ignore[union-attr]  # a Node
        if self._has_writes or any(n.op == "get_attr" or _writes(n) for n in body.nodes):
            raise _NotPlainError
        arguments = iter(node.args[2:])
        for inner in body.nodes:
            if inner.op == "placeholder":
                self._same[inner] = next(arguments)  # type: ignore[assignment]  # regions take nodes
            elif inner.op == "output":
                self._regions[node] = inner.args[0]
            else:
                self._visit(inner)

    def _write(self, node: Node) -> None:
        """An operator that writes to its first argument, which it returns."""
        if not isinstance(node.args[0], Node):
            raise _NotPlainError
        self._same[node] = written = self._itself(node.args[0])
        self._put(written, self._call(_functional(node), node.args, node.kwargs, written.meta["val"], node), node)

    def _batch_norm(self, node: Node) -> None:
        """A batch norm, with the new running statistics where it updates them."""
        found = functional_batch_norm(node)
        if found is None:
            raise _NotPlainError
        call = self._call(found.target, found.arguments, {}, found.results, node)
        self._made(node, self._part(call, 0, node))
        for index, statistic in found.updates:
            self._put(self._itself(statistic), self._part(call, index, node), node)

    def _put(self, written: Node, value: Node, origin: Node) -> None:
        """Puts what is written in the place of what was there, for all that is read from here on."""
        storages = _storages(written)
        if len(storages) != 1 or written in self._old:
            raise _NotPlainError
        made, *others = self._sharing[storages[0]]
        self._now[written] = value
        path = {written}
        while written is not made:
            if written.target not in _WRITTEN_BACK:
                raise _NotPlainError
            view, written = written, self._itself(written.all_input_nodes[0])
            arguments = (written, view, *view.args[1:])
            value = self._call(_WRITTEN_BACK[view.target], arguments, view.kwargs, written.meta["val"], origin)
            self._now[written] = value
            path.add(written)
        if not isinstance(made.meta.get("val"), torch.Tensor):
            raise _NotPlainError
        if made.op == "placeholder":
            if made.name not in self._buffers or any(other.op == "placeholder" for other in others):
                raise _NotPlainError
            self._written.add(made)
        elif made.op != "call_function":
            raise _NotPlainError
        self._old.update(other for other in others if other not in path)

    def _output(self, node: Node) -> None:
        """The new values of buffers, in the buffers' order, and forward's results, of which none may be a buffer."""
        written = [place for place in self._now if place in self._written]
        memory = {storage for place in written for storage in _storages(place)}
        if any(not memory.isdisjoint(_storages(result)) for result in node.all_input_nodes):
            raise _NotPlainError
        values = [self._now[place] for place in written]
        for place, value in zip(written, values, strict=True):
            argument, target = TensorArgument(name=value.name), self._buffers[place.name]
            self.mutations.append(OutputSpec(OutputKind.BUFFER_MUTATION, argument, target))
        results: Any = map_arg(node.args[0], self._value)
        self.graph.output((*values, *results)).meta = dict(node.meta)

    def _part(self, call: Node, index: int, origin: Node) -> Node:
        part = self.graph.call_function(operator.getitem, (call, index))
        part.meta = {**origin.meta, "val": call.meta["val"][index]}
        return part

    def _call(self, target: Any, args: Any, kwargs: Any, result: Any, origin: Node) -> Node:
        """A call whose result has the type of `result`, at the place in the user's code that `origin` has."""
        given: Any = map_arg((args, kwargs), self._value)
        call = self.graph.create_node("call_function", target, given[0], given[1], target.overloadpacket.__name__)
        call.meta = {**origin.meta, "val": result}
        return call


def _writes(node: Node) -> bool:
    target = node.target
    return (isinstance(target, OpOverload) and schema_of(target).is_mutable) or updates_statistics(node)


def _storages(node: Node) -> list[int]:
    """The storages of a node's tensors.

    Raises:
        _NotPlainError: it stands inside of `torch.vmap` or `torch.func`, whose tensors have none.
    """
    found = pytree.tree_leaves(node.meta.get("val"))
    tensors = [v for v in found if isinstance(v, torch.Tensor) and v.layout is torch.strided]
    if any(is_transformed(t) for t in tensors):
        raise _NotPlainError
    return [storage_id(t) for t in tensors]


def _arguments(operator: Any) -> list[tuple[str, str, bool]]:
    return [(a.name, str(a.type), a.kwarg_only) for a in schema_of(operator).arguments]


def _functional(node: Node) -> Any:
    """The operator that gives what an in-place one writes to its first argument.

    Raises:
        _NotPlainError: there is none that has a definition, or it gives another type.
    """
    target: Any = node.target
    writes = [a.alias_info is not None and a.alias_info.is_write for a in schema_of(target).arguments]
    namespace, _, name = schema_of(target).name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    # By its arguments: pow_.Scalar takes a number as exponent, pow.Scalar as base.
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    found: Any = next((o for o in overloads if _arguments(o) == _arguments(target)), None)
    if not name.endswith("_") or str(found) not in FROM_TORCH or writes != [True] + [False] * (len(writes) - 1):
        raise _NotPlainError
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise _NotPlainError
    if found is aten.copy.default:  # casts to the type of what it writes to
        return found
    given: Any = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    args, kwargs = given
    mode = args[0].fake_mode
    with mode, mode.shape_env.suppress_guards(), mode.shape_env.ignore_fresh_unbacked_symbols():
        try:
            result = found(*args, **kwargs)
        except RuntimeError as error:  # the functional operator lacks a kernel for symbolic sizes
            raise _NotPlainError from error
        if result.dtype != args[0].dtype:
            raise _NotPlainError
    return found


def _is_grad_mode_region(node: Node) -> bool:
    """Whether a node is a region of `torch.no_grad()` or `torch.enable_grad()`."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled"
