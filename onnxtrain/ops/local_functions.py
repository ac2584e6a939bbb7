"""Write the bodies of ops as model-local functions, which the graph's nodes call.

    GeluGrad(dy, x)  ->  GeluGrad(dy, x)    and    function GeluGrad(dy, x) -> dx { Mul, Erf, Exp, ... }

A body depends on ranks, element types, attributes and the presence of optional inputs. Each such case is a separate
function: all have the op's name, the first has no overload, the others "1", "2", ... Sizes are not part of a case: a
function computes those that it needs from its inputs. Only if a body needs the value of a size, or is written for the
sizes of an input (`static_shape_inputs`), there is one function for each of these.

Functions call no functions: inside a function, onnxruntime 1.31 silently calls the wrong overload.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import ONNX, TensorType, dtype_of, set_type, type_of
from onnxtrain.ops.bodies import body_of, build_body, close, import_opsets, inline_bodies
from onnxtrain.ops.definition import OPSET, NoBody, OpDef
from onnxtrain.ops.interfaces.local_functions import STATIC_SHAPE_INPUTS
from onnxtrain.ops.registry import builder, definition_of
from onnxtrain.ops.symbolic_ints import known_ints

_MAX_CONSTANT_SIZE = 64  # elements of a constant whose values a body may read (axes, shapes)


def as_functions(model: ir.Model) -> ir.Model:
    """Return a copy in which every op with a body is a call of a model-local function.

    Ops without a body (PythonOp, ATen) are unchanged. Functions cannot be in ONNX's own domain: bodies of ops in that
    domain are inlined.
    """
    copy = inline_bodies(model, keep=lambda node: node.domain != ONNX or body_of(node) is None)
    functions = _Functions()
    for node in copy.graph.all_nodes():
        if body_of(node) is not None:
            node.overload = functions.overload_for(node)
    for function in functions.created:
        _drop_sizes(function)
    return traversal.with_graph(copy, copy.graph, functions.created)


def _drop_sizes(function: ir.Function) -> None:
    """Keep only the ranks of a function's values: a symbol is a different size in each call.

    Tools that inline functions copy the symbols, and onnxruntime shares buffers between tensors of equal shapes.
    """
    subgraph_inputs = (value for node in function for graph in traversal.subgraphs(node) for value in graph.inputs)
    results = (output for node in function.all_nodes() for output in node.outputs)
    for value in (*function.inputs, *subgraph_inputs, *results):
        if value.shape is not None:
            value.shape = ir.Shape([None] * len(value.shape))


class _SizeDetail(enum.IntEnum):
    """The detail in which a body knows the sizes of its inputs. Less detail makes fewer functions."""

    NAMES = 0  # a symbol per distinct size
    RELATIONS = 1  # a size may also be an expression of others
    VALUES = 2  # static sizes are integers


@dataclass(frozen=True)
class _Case:
    """All that a body may depend on: the key of a function, and the function's inputs."""

    key: tuple[Any, ...]
    inputs: tuple[ir.Value | None, ...]
    caller: Mapping[str, Size]  # the caller's size for each symbol of the function

    def returns(self, node: ir.Node, outputs: Sequence[TensorType]) -> bool:
        """Return whether these output types of the function, in the caller's sizes, are the node's declared types."""
        return all(
            type_of(value) == TensorType(dtype, tuple(_substitute(size, self.caller) for size in shape))
            for value, (dtype, shape) in zip(node.outputs, outputs, strict=True)
        )


class _Functions:
    """The functions created so far, by case of each op; None if the body needs more detail of the sizes."""

    def __init__(self) -> None:
        self._by_case: dict[tuple[Any, ...], ir.Function | None] = {}

    @property
    def created(self) -> list[ir.Function]:
        return [function for function in self._by_case.values() if function is not None]

    def overload_for(self, node: ir.Node) -> str:
        """Return the overload of the function that computes this node, created if there is none."""
        for detail in _SizeDetail:
            case = _case(node, detail)
            if case.key not in self._by_case:
                self._by_case[case.key] = self._create(node, case, detail)
            function = self._by_case[case.key]
            if function is None:
                continue
            if detail is _SizeDetail.VALUES or case.returns(node, [type_of(value) for value in function.outputs]):
                return function.overload
        raise AssertionError("the case of the most detail raises an error or creates a function")

    def _create(self, node: ir.Node, case: _Case, detail: _SizeDetail) -> ir.Function | None:
        try:
            graph = _function_graph(node, case.inputs)
        except (GraphError, ValueError, TypeError):
            if detail is _SizeDetail.VALUES:
                raise
            return None
        if detail is not _SizeDetail.VALUES and not case.returns(node, [type_of(value) for value in graph.outputs]):
            return None
        overload_count = sum((f.domain, f.name) == (node.domain, node.op_type) for f in self.created)
        function = ir.Function(
            node.domain,
            node.op_type,
            str(overload_count) if overload_count else "",
            graph=graph,
            attributes=list(node.attributes.values()),
        )
        function.doc_string = _describe(node, graph)
        return function


def _case(node: ir.Node, detail: _SizeDetail) -> _Case:
    present = [value for value in node.inputs if value is not None]
    definition = definition_of(node)
    input_names = _input_names(definition, len(node.inputs))
    static = STATIC_SHAPE_INPUTS.entry(node) or ()
    shapes = (sizes.dims_of(v) for v, name in zip(node.inputs, input_names, strict=True) if v and name in static)
    names = _LocalSizes(present, detail, {size for shape in shapes for size in shape if isinstance(size, int)})
    inputs: list[ir.Value | None] = []
    key: list[Any] = []
    for value, name in zip(node.inputs, input_names, strict=True):
        if value is None:
            inputs.append(None)
            key.append(None)
            continue
        local = ir.Value(name=name)
        set_type(local, TensorType(dtype_of(value), names.local(sizes.dims_of(value))))
        constant = _readable_constant(value, detail)
        local.const_value = constant
        if constant is not None and "scalar" in value.meta:
            local.meta["scalar"] = value.meta["scalar"]
        held_sizes = None if constant is not None else _held_sizes(value)
        if held_sizes is not None:
            local.meta["sizes"] = held_sizes = names.local(held_sizes)
        inputs.append(local)
        key.append((type_of(local), held_sizes, None if constant is None else constant.numpy().tobytes()))
    attributes = tuple((a.name, _attribute_key(a)) for a in sorted(node.attributes.values(), key=lambda a: a.name))
    identity = (node.domain, node.op_type, len(node.outputs), attributes, tuple(key), detail)
    return _Case(identity, tuple(inputs), names.caller)


def _readable_constant(value: ir.Value, detail: _SizeDetail) -> ir.TensorProtocol | None:
    """Return the constant that the body may read: a small one of int64, or with VALUES of any type."""
    tensor = value.const_value
    if tensor is None or tensor.size > _MAX_CONSTANT_SIZE:
        return None
    return tensor if tensor.dtype == ir.DataType.INT64 or detail is _SizeDetail.VALUES else None


def _held_sizes(value: ir.Value) -> Sizes | None:
    """Return the sizes that a computed int64 scalar or vector holds; None if they are unknown."""
    if dtype_of(value) != ir.DataType.INT64 or len(sizes.dims_of(value)) > 1 or value.const_value is not None:
        return None
    return known_ints(value)


def _attribute_key(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes()
    return attribute.type, repr(attribute.value)


class _LocalSizes:
    """Map the sizes of a call to symbols of the function.

    An expression (2*s0) stays one, from RELATIONS on, if its symbols are sizes of dimensions. 0, 1 and `static_sizes`
    stay integers.

    Attributes:
        caller: the caller's size for each symbol of the function.
    """

    def __init__(self, values: Sequence[ir.Value], detail: _SizeDetail, static_sizes: set[int]) -> None:
        self._static_sizes = {0, 1} | static_sizes
        self.caller: dict[str, Size] = {}
        self._detail = detail
        self._local: dict[Size, str] = {}
        dims = [size for value in values for size in sizes.dims_of(value)]
        self._dim_symbols = {size for size in dims if isinstance(size, str) and size.isidentifier()}

    def local(self, shape: Sizes) -> Sizes:
        """Return a shape of the call in symbols of the function."""
        return tuple(map(self._local_size, shape))

    def _local_size(self, size: Size) -> Size:
        if isinstance(size, int):
            return size if self._detail is _SizeDetail.VALUES or size in self._static_sizes else self._symbol(size)
        symbols = sizes.symbols(size)
        if self._detail is _SizeDetail.NAMES or size.isidentifier() or not symbols <= self._dim_symbols:
            return self._symbol(size)
        return _substitute(size, {symbol: self._symbol(symbol) for symbol in sorted(symbols)})

    def _symbol(self, size: Size) -> str:
        if size not in self._local:
            self._local[size] = name = f"d{len(self._local)}"
            self.caller[name] = size
        return self._local[size]


def _substitute(size: Size, values: Mapping[str, Size]) -> Size:
    if isinstance(size, int):
        return size
    if size in values:
        return values[size]
    replaced = {sizes.symbol(name): sizes.parse(values[name]) for name in sizes.symbols(size) if name in values}
    return sizes.from_sympy(sizes.parse(size).subs(replaced, simultaneous=True))


def _input_names(definition: OpDef, count: int) -> list[str]:
    """Return the names of a function's inputs: those of the definition; members of a variadic input are numbered."""
    declared = definition.inputs
    names = [name.rstrip("?") for name in declared if not name.endswith("...")]
    if len(names) < len(declared):
        names += [f"{declared[-1].removesuffix('...')}_{i}" for i in range(count - len(names))]
    return names[:count]


def _output_names(definition: OpDef, count: int) -> list[str]:
    names = [name.rstrip("?") for name in definition.outputs if not name.endswith("...")]
    if len(names) < len(definition.outputs):
        names += [f"{definition.outputs[-1].removesuffix('...')}_{i}" for i in range(count - len(names))]
    return names[:count]


def _function_graph(node: ir.Node, inputs: Sequence[ir.Value | None]) -> ir.Graph:
    """Build the body as a graph of standard ops, with Constant nodes in place of initializers."""
    definition = definition_of(node)
    names = _input_names(definition, len(inputs))
    parameters = [ir.Value(name=name) if v is None else v for v, name in zip(inputs, names, strict=True)]
    graph = ir.Graph(parameters, [], nodes=(), name=node.op_type, opset_imports={ONNX: OPSET})
    op = builder(graph)
    _register_held_sizes(op, inputs)
    outputs: list[ir.Value] = []
    for index, value in enumerate(build_body(op, node, inputs)):
        if value is None:
            raise GraphError(
                f"the body of {traversal.describe(node)} does not build output {index}, which its function returns"
            )
        outputs.append(value)
    close(graph, outputs, _output_names(definition, len(outputs)))
    model = inline_bodies(graph, keep=lambda inner: isinstance(definition_of(inner).body, NoBody))
    graph = model.graph
    _constants_to_nodes(graph)
    traversal.name_uniquely(graph)
    import_opsets(graph)
    return graph


def _register_held_sizes(op: Builder, inputs: Sequence[ir.Value | None]) -> None:
    """Let the builder read a size that no dimension has from the shape vector that holds it."""
    dims = {size for value in inputs if value is not None for size in sizes.dims_of(value)}
    size_values: dict[str, ir.Value] = op.graph.meta.setdefault("size_values", {})
    for value in inputs:
        if value is None or value.const_value is not None:
            continue
        for index, size in enumerate(value.meta.get("sizes") or ()):
            if isinstance(size, str) and size.isidentifier() and size not in dims and size not in size_values:
                position = op.constant([index], ir.DataType.INT64)
                is_vector = bool(sizes.dims_of(value))
                size_values[size] = op.Gather(value, position, axis=0) if is_vector else op.Unsqueeze(value, position)


def _constants_to_nodes(graph: ir.Graph) -> None:
    """Replace initializers by Constant nodes: functions have no initializers."""
    first = next(iter(graph), None)
    for value in list(graph.initializers.values()):
        assert value.const_value is not None
        constant = ir.Node(ONNX, "Constant", (), [ir.AttrTensor("value", value.const_value)])
        set_type(constant.outputs[0], type_of(value))
        del graph.initializers[str(value.name)]
        if first is None:
            graph.append(constant)
        else:
            graph.insert_before(first, constant)
        value.replace_all_uses_with(constant.outputs[0], replace_graph_outputs=True)
        constant.outputs[0].name = value.name


def _describe(node: ir.Node, graph: ir.Graph) -> str:
    """Describe the case of a function in its doc string."""
    parts = [_typed(v) for v in graph.inputs] + [f"{a.name}={a.value!r}" for a in node.attributes.values()]
    return f"{node.op_type}({', '.join(parts)}) -> {', '.join(map(_typed, graph.outputs))}"


def _typed(value: ir.Value) -> str:
    if value.dtype is None:
        return f"{value.name}: absent"
    return f"{value.name}: {value.dtype.name.lower()}[{', '.join(map(str, sizes.dims_of(value)))}]"
