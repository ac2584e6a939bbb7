"""Graphs whose ops of ours stay, with their bodies beside them as model-local functions.

    GeluGrad(dy, x)  ->  GeluGrad(dy, x)    and    function GeluGrad(dy, x) -> dx { Mul, Erf, Exp, ... }

A body depends on ranks, element types, attributes and which optional inputs are there. Each such case is a function of
its own: all have the op's name, the first no overload, the others "1", "2", ... Sizes do not count: a function computes
those that it needs from its inputs. Only a body that asks for a number gets one function for each number, and one that
is written by the sizes of an input (`sized`) one for each of these.

Functions call no functions: onnxruntime 1.31 takes the wrong overload inside a function, without a word.
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
from onnxtrain.ops.registry import builder, definition_of
from onnxtrain.ops.symbolic_ints import known_ints

_FEW = 64  # elements of an integer constant that a body may look at (axes, shapes)


def as_functions(model: ir.Model) -> ir.Model:
    """A copy in which every op with a body is a call of a model-local function.

    Ops without a body (PythonOp, ATen) stay as they are. An op of ONNX's own domain cannot be a function there: its
    body, where it has one, is inlined.
    """
    copy = inline_bodies(model, keep=lambda node: node.domain != ONNX or body_of(node) is None)
    functions = _Functions()
    for node in copy.graph.all_nodes():
        if body_of(node) is not None:
            node.overload = functions.overload_for(node)
    for function in functions.made:
        _forget_sizes(function)
    return traversal.with_graph(copy, copy.graph, functions.made)


def _forget_sizes(function: ir.Function) -> None:
    """Leaves the ranks of a function's values only: a symbol stands for another size in each call.

    Tools that inline functions copy the symbols, and onnxruntime gives tensors of equal shapes one buffer.
    """
    inner = (value for node in function for graph in traversal.subgraphs(node) for value in graph.inputs)
    for value in (*function.inputs, *inner, *(output for node in function.all_nodes() for output in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape([None] * len(value.shape))


class _Known(enum.IntEnum):
    """What a body is told of the sizes of its inputs; the least that it can do with is best."""

    NAMES = 0  # equal sizes have one name
    RELATIONS = 1  # and a size may be a compound of others
    NUMBERS = 2  # and numbers are numbers


@dataclass(frozen=True)
class _Case:
    """What a body may look at: the key of a function, and the function's inputs."""

    key: tuple[Any, ...]
    inputs: tuple[ir.Value | None, ...]
    caller: Mapping[str, Size]  # the caller's size for each symbol of the function

    def returns(self, node: ir.Node, outputs: Sequence[TensorType]) -> bool:
        """Whether a function with these output types gives what the node is declared to give."""
        return all(
            type_of(value) == TensorType(dtype, tuple(_substitute(size, self.caller) for size in shape))
            for value, (dtype, shape) in zip(node.outputs, outputs, strict=True)
        )


class _Functions:
    """The functions made so far, one for each case of each op; None for a case whose body asks for more."""

    def __init__(self) -> None:
        self._of: dict[tuple[Any, ...], ir.Function | None] = {}

    @property
    def made(self) -> list[ir.Function]:
        return [function for function in self._of.values() if function is not None]

    def overload_for(self, node: ir.Node) -> str:
        """The overload of the function that computes this node, made if there is none."""
        for known in _Known:
            case = _case(node, known)
            if case.key not in self._of:
                self._of[case.key] = self._make(node, case, known)
            function = self._of[case.key]
            if function is None:
                continue
            if known is _Known.NUMBERS or case.returns(node, [type_of(value) for value in function.outputs]):
                return function.overload
        raise AssertionError("the last case raises an error or makes a function")

    def _make(self, node: ir.Node, case: _Case, known: _Known) -> ir.Function | None:
        try:
            graph = _function_graph(node, case.inputs)
        except (GraphError, ValueError, TypeError):
            if known is _Known.NUMBERS:
                raise
            return None
        if known is not _Known.NUMBERS and not case.returns(node, [type_of(value) for value in graph.outputs]):
            return None
        before = sum((f.domain, f.name) == (node.domain, node.op_type) for f in self.made)
        function = ir.Function(
            node.domain,
            node.op_type,
            str(before) if before else "",
            graph=graph,
            attributes=list(node.attributes.values()),
        )
        function.doc_string = _describe(node, graph)
        return function


def _case(node: ir.Node, level: _Known) -> _Case:
    present = [value for value in node.inputs if value is not None]
    definition = definition_of(node)
    input_names = _input_names(definition, len(node.inputs))
    shapes = (
        sizes.dims_of(v)
        for v, name in zip(node.inputs, input_names, strict=True)
        if v and name in definition.static_shape_inputs
    )
    names = _LocalSizes(present, level, {size for shape in shapes for size in shape if isinstance(size, int)})
    inputs: list[ir.Value | None] = []
    key: list[Any] = []
    for value, name in zip(node.inputs, input_names, strict=True):
        if value is None:
            inputs.append(None)
            key.append(None)
            continue
        local = ir.Value(name=name)
        set_type(local, TensorType(dtype_of(value), names.local(sizes.dims_of(value))))
        baked = _baked(value, level)
        local.const_value = baked
        if baked is not None and "scalar" in value.meta:
            local.meta["scalar"] = value.meta["scalar"]
        known = None if baked is not None else _held(value)
        if known is not None:
            local.meta["sizes"] = known = names.local(known)
        inputs.append(local)
        key.append((type_of(local), known, None if baked is None else baked.numpy().tobytes()))
    attributes = tuple((a.name, _attribute_key(a)) for a in sorted(node.attributes.values(), key=lambda a: a.name))
    identity = (node.domain, node.op_type, len(node.outputs), attributes, tuple(key), level)
    return _Case(identity, tuple(inputs), names.caller)


def _baked(value: ir.Value, level: _Known) -> ir.TensorProtocol | None:
    """The constant that the body may look at: small integer ones, and those of any type at NUMBERS."""
    tensor = value.const_value
    if tensor is None or tensor.size > _FEW:
        return None
    return tensor if tensor.dtype == ir.DataType.INT64 or (level is _Known.NUMBERS) else None


def _held(value: ir.Value) -> Sizes | None:
    """The sizes that an integer or a short vector of integers holds, where they are known."""
    if dtype_of(value) != ir.DataType.INT64 or len(sizes.dims_of(value)) > 1 or value.const_value is not None:
        return None
    return known_ints(value)


def _attribute_key(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes()
    return attribute.type, repr(attribute.value)


class _LocalSizes:
    """Gives the sizes of a call names of the function's own.

    A compound (2*s0) stays one, from RELATIONS on, where its symbols are sizes themselves. 0, 1 and `numbers` are what
    they are.
    """

    def __init__(self, values: Sequence[ir.Value], level: _Known, numbers: set[int]) -> None:
        self._numbers = {0, 1} | numbers
        self.caller: dict[str, Size] = {}
        self._level = level
        self._local: dict[Size, str] = {}
        dims = [size for value in values for size in sizes.dims_of(value)]
        self._plain = {size for size in dims if isinstance(size, str) and size.isidentifier()}

    def local(self, shape: Sizes) -> Sizes:
        return tuple(map(self._one, shape))

    def _one(self, size: Size) -> Size:
        if isinstance(size, int):
            return size if self._level is _Known.NUMBERS or size in self._numbers else self._named(size)
        parts = sizes.symbols(size)
        if self._level is _Known.NAMES or size.isidentifier() or not parts <= self._plain:
            return self._named(size)
        return _substitute(size, {part: self._named(part) for part in sorted(parts)})

    def _named(self, size: Size) -> str:
        if size not in self._local:
            self._local[size] = name = f"d{len(self._local)}"
            self.caller[name] = size
        return self._local[size]


def _substitute(size: Size, known: Mapping[str, Size]) -> Size:
    if isinstance(size, int):
        return size
    if size in known:
        return known[size]
    replaced = {sizes.symbol(name): sizes.parse(known[name]) for name in sizes.symbols(size) if name in known}
    return sizes.from_sympy(sizes.parse(size).subs(replaced, simultaneous=True))


def _input_names(definition: OpDef, count: int) -> list[str]:
    """The names of a function's inputs: those of the definition; a variadic's members are numbered."""
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
    """The body as a graph of standard ops, with Constant nodes in place of initializers."""
    definition = definition_of(node)
    names = _input_names(definition, len(inputs))
    formal = [ir.Value(name=name) if v is None else v for v, name in zip(inputs, names, strict=True)]
    graph = ir.Graph(formal, [], nodes=(), name=node.op_type, opset_imports={ONNX: OPSET})
    op = builder(graph)
    _note_sizes(op, inputs)
    outputs: list[ir.Value] = []
    for index, value in enumerate(build_body(op, node, inputs)):
        if value is None:
            raise GraphError(f"the body of {traversal.describe(node)} leaves out output {index}")
        outputs.append(value)
    close(graph, outputs, _output_names(definition, len(outputs)))
    model = inline_bodies(graph, keep=lambda inner: isinstance(definition_of(inner).body, NoBody))
    graph = model.graph
    _constants_to_nodes(graph)
    traversal.name_uniquely(graph)
    import_opsets(graph)
    return graph


def _note_sizes(op: Builder, inputs: Sequence[ir.Value | None]) -> None:
    """Lets the builder find a size that only a shape vector holds: at its place in the vector."""
    dims = {size for value in inputs if value is not None for size in sizes.dims_of(value)}
    known: dict[str, ir.Value] = op.graph.meta.setdefault("size_values", {})
    for value in inputs:
        if value is None or value.const_value is not None:
            continue
        for index, size in enumerate(value.meta.get("sizes") or ()):
            if isinstance(size, str) and size.isidentifier() and size not in dims and size not in known:
                place = op.constant([index], ir.DataType.INT64)
                known[size] = op.Gather(value, place, axis=0) if sizes.dims_of(value) else op.Unsqueeze(value, place)


def _constants_to_nodes(graph: ir.Graph) -> None:
    """Functions have no initializers."""
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
    """The case that a function is made for, to be read beside its overload."""
    parts = [_typed(v) for v in graph.inputs] + [f"{a.name}={a.value!r}" for a in node.attributes.values()]
    return f"{node.op_type}({', '.join(parts)}) -> {', '.join(map(_typed, graph.outputs))}"


def _typed(value: ir.Value) -> str:
    if value.dtype is None:
        return f"{value.name}: absent"
    return f"{value.name}: {value.dtype.name.lower()}[{', '.join(map(str, sizes.dims_of(value)))}]"
