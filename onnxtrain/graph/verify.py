"""The verifier: a graph is whole, in order, typed as its ops say, and valid ONNX.

Every stage's graph passes here, so that a fault shows at the pass that made it and not as a wrong number at the end.
The first fault found is raised, with the node, the user's module and line it comes from, and what was expected.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import onnx
import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.values import ONNX, TensorType, dtype_of, type_of


class Definition(Protocol):
    """What the verifier asks of an op's definition."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names; `x?` is optional, `xs...` variadic."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names, marked like those of inputs."""

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Name to default."""

    @property
    def required(self) -> frozenset[str]:
        """The attributes without a default."""

    def output_types(self, node: ir.Node) -> Sequence[TensorType]:
        """What the shape rule says."""


Definitions = Callable[[str, str], Definition]


def verify(graph: ir.Graph | ir.Model, definitions: Definitions, known: set[Hashable] | None = None) -> None:
    """Checks a graph and its subgraphs.

    Args:
        graph: the graph, or a model with one.
        definitions: (domain, op) -> definition; raises GraphError for an op that there is none of.
        known: kinds of nodes that were found right with these definitions; more are put there.

    Raises:
        GraphError: the first fault: a value that is read before it is produced or does not belong to the graph, a
            missing or wrong type, an op, input, output or attribute that its definition or ONNX does not have, or
            names that are missing or used twice.
    """
    graph = graph.graph if isinstance(graph, ir.Model) else graph
    _verify_names(graph)
    opset = graph.opset_imports.get(ONNX, onnx.defs.onnx_opset_version())
    _Verifier(definitions, opset, set() if known is None else known).verify(graph, set())


def agree(a: TensorType, b: TensorType) -> bool:
    """Whether two types can be the same.

    Two sizes that are not proven equal may be equal under the guards of the capture; two numbers may not.
    """
    return (
        a.dtype == b.dtype
        and len(a.shape) == len(b.shape)
        and all(x == y or isinstance(x, str) or isinstance(y, str) for x, y in zip(a.shape, b.shape, strict=True))
    )


def show(tensor_type: TensorType) -> str:
    """A type as messages show it: `float[s0, 8]`."""
    return f"{tensor_type.dtype.name.lower()}[{', '.join(map(str, tensor_type.shape))}]"


class _Verifier:
    def __init__(self, definitions: Definitions, opset: int, known: set[Hashable]) -> None:
        self._definitions = definitions
        self._opset = opset
        self._known = known

    def verify(self, graph: ir.Graph, outer: set[ir.Value]) -> None:
        """Checks a graph whose nodes may read the values of `outer`."""
        for value in graph.inputs:
            _verify_typed(value, "the graph's input", graph.name)
        for value in graph.initializers.values():
            _verify_initializer(value, graph.name)
        ready = {*outer, *graph.inputs, *graph.initializers.values()}
        for node in graph:
            for read in node.inputs:
                if read is not None and read not in ready:
                    raise _not_ready(node, read, graph)
            for inner in traversal.subgraphs(node):
                self.verify(inner, ready)
            self._verify_once(node)
            ready.update(node.outputs)
        for value in graph.outputs:
            if value not in ready:
                raise GraphError(f"the output {value.name!r} is not produced by the graph", where=graph.name)

    def _verify_once(self, node: ir.Node) -> None:
        """Layers repeat nodes and stages keep them: of the 3200 of a T5 of six layers 170 differ."""
        key = _kind(node, self._opset)
        if key is None or key not in self._known:
            self._verify_node(node)
            if key is not None:
                self._known.add(key)

    def _verify_node(self, node: ir.Node) -> None:
        try:
            definition = self._definitions(node.domain, node.op_type)
        except GraphError as error:
            raise _fault(node, error.what, todo="define the op, or let no pass make it") from error
        for value in node.outputs:
            if value.dtype is None or value.shape is None:
                raise _fault(node, f"the output {value.name!r} has no type")
        _verify_inputs(node, definition)
        _verify_attributes(node, definition)
        _verify_outputs(node, definition)
        if node.domain == ONNX:
            verify_standard(node, self._opset)


def _kind(node: ir.Node, opset: int) -> Hashable | None:
    """What the checks of a single node look at; None where that is too much to compare."""
    attributes: list[Hashable] = []
    for attribute in node.attributes.values():
        if attribute.type not in _COMPARED:
            return None
        value = attribute.value
        attributes.append((attribute.name, attribute.type, tuple(value) if isinstance(value, list) else value))
    values: list[Hashable] = []
    for value in (*node.inputs, *node.outputs):
        if value is None:
            values.append(None)
        elif value.dtype is None or value.shape is None:
            return None
        else:
            values.append((value.dtype, sizes.dims_of(value), value.const_value))
    # Sizes and axes by themselves: a shape may follow from what computes them.
    values += [v for v in node.inputs if v is not None and v.dtype == ir.DataType.INT64 and len(v.shape or ()) <= 1]
    return opset, node.domain, node.op_type, len(node.inputs), tuple(attributes), tuple(values)


_COMPARED = frozenset(
    getattr(ir.AttributeType, kind) for kind in ("INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS")
)


def _fault(
    node: ir.Node, what: str, expected: object = None, got: object = None, todo: str | None = None
) -> GraphError:
    return GraphError(f"{traversal.describe(node)}: {what}", traversal.origin(node), expected, got, todo)


def _not_ready(node: ir.Node, value: ir.Value, graph: ir.Graph) -> GraphError:
    producer = value.producer()
    if producer is not None and producer.graph is graph:
        got = f"its producer {traversal.describe(producer)} comes later"
    elif producer is not None and producer.graph is None:
        got = f"its producer {traversal.describe(producer)} was removed from the graph"
    elif producer is not None:
        got = f"its producer {traversal.describe(producer)} belongs to another graph"
    else:
        got = "it is no input and no initializer of the graph"
    return _fault(node, f"reads {value.name!r}, which is not there yet", "values that are produced before", got)


def _verify_names(graph: ir.Graph) -> None:
    values: list[str | None] = [v.name for v in dict.fromkeys((*graph.inputs, *graph.initializers.values()))]
    nodes: list[str | None] = []
    for node in graph.all_nodes():
        nodes.append(node.name)
        values += [value.name for value in node.outputs]
    for kind, names in (("values", values), ("nodes", nodes)):
        if not all(names):
            raise GraphError(f"{sum(not name for name in names)} {kind} have no name", where=graph.name)
        twice = sorted(str(name) for name, count in Counter(names).items() if count > 1)
        if twice:
            raise GraphError(f"names of {kind} are used twice", where=graph.name, got=", ".join(twice))


def _verify_typed(value: ir.Value, role: str, where: str | None) -> None:
    if value.dtype is None or value.shape is None:
        raise GraphError(f"{role} {value.name!r} has no type", where=where)


def _verify_initializer(value: ir.Value, where: str | None) -> None:
    _verify_typed(value, "the initializer", where)
    tensor = value.const_value
    if tensor is None:
        raise GraphError(f"the initializer {value.name!r} has no elements", where=where)
    held = TensorType(tensor.dtype, tuple(int(size) for size in tensor.shape.numpy()))
    if held != type_of(value):
        raise GraphError(
            f"the elements of the initializer {value.name!r} have another type than the value",
            where=where,
            expected=show(type_of(value)),
            got=show(held),
        )


# Against the op's definition


def _verify_inputs(node: ir.Node, definition: Definition) -> None:
    declared = definition.inputs
    variadic = bool(declared) and declared[-1].endswith("...")
    if len(node.inputs) > len(declared) and not variadic:
        raise _fault(node, "has too many inputs", f"at most {len(declared)}", len(node.inputs))
    for index, name in enumerate(declared):
        present = index < len(node.inputs) and node.inputs[index] is not None
        if not present and not name.endswith(("?", "...")):
            raise _fault(node, f"lacks its input {name!r}", ", ".join(declared))
    for value in node.inputs:
        if value is not None and (value.dtype is None or value.shape is None):
            raise _fault(node, f"its input {value.name!r} has no type")


def _verify_attributes(node: ir.Node, definition: Definition) -> None:
    unknown = sorted(node.attributes.keys() - definition.attributes.keys())
    if unknown:
        known = ", ".join(definition.attributes) or "none"
        raise _fault(node, "has attributes that the op does not have", known, ", ".join(unknown))
    missing = sorted(definition.required - node.attributes.keys())
    if missing:
        raise _fault(node, f"lacks the attributes {', '.join(missing)}")


def _verify_outputs(node: ir.Node, definition: Definition) -> None:
    declared = definition.outputs
    needed = sum(not name.endswith(("?", "...")) for name in declared)
    if len(node.outputs) < needed or (len(node.outputs) > len(declared) and not declared[-1].endswith("...")):
        raise _fault(node, "has the wrong number of outputs", ", ".join(declared), len(node.outputs))
    try:
        types = definition.output_types(node)
    except Exception as error:
        raise _fault(node, f"its shape rule failed: {error}") from error
    if len(types) < len(node.outputs):
        raise _fault(node, "has more outputs than its shape rule gives", len(types), len(node.outputs))
    for value, expected in zip(node.outputs, types, strict=False):
        if not agree(type_of(value), TensorType(*expected)):
            raise _fault(
                node, f"the type of {value.name!r} is wrong", show(TensorType(*expected)), show(type_of(value))
            )


# Against ONNX


@dataclass(frozen=True)
class _Parameter:
    """One declared input or output of a standard op."""

    name: str
    type_name: str
    optional: bool
    variadic: bool
    one_type: bool  # of a variadic: whether all members have the same type


@dataclass(frozen=True)
class _Standard:
    """ONNX's own schema of an op."""

    inputs: tuple[_Parameter, ...]
    outputs: tuple[_Parameter, ...]
    min_inputs: int
    max_inputs: int
    min_outputs: int
    max_outputs: int
    allowed: Mapping[str, frozenset[str]]  # type name -> types
    attributes: Mapping[str, str]  # name -> type
    required: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _standard(op_type: str, opset: int) -> _Standard | None:
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    allowed = {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints}
    inputs, outputs = (tuple(map(_parameter, formals)) for formals in (schema.inputs, schema.outputs))
    for parameter, formal in zip((*inputs, *outputs), (*schema.inputs, *schema.outputs), strict=True):
        allowed.setdefault(parameter.type_name, frozenset(formal.types))
    return _Standard(
        inputs,
        outputs,
        schema.min_input,
        schema.max_input,
        schema.min_output,
        schema.max_output,
        allowed,
        {name: str(attribute.type).rpartition(".")[2] for name, attribute in schema.attributes.items()},
        frozenset(name for name, attribute in schema.attributes.items() if attribute.required),
    )


def _parameter(formal: onnx.defs.OpSchema.FormalParameter) -> _Parameter:
    kind = onnx.defs.OpSchema.FormalParameterOption
    return _Parameter(
        formal.name,
        formal.type_str,
        formal.option == kind.Optional,
        formal.option == kind.Variadic,
        formal.is_homogeneous,
    )


def verify_standard(node: ir.Node, opset: int) -> None:
    """Checks a node of a standard op against ONNX's own schema: inputs, outputs, attributes, type constraints.

    Raises:
        GraphError: the node is not valid in this opset.
    """
    schema = _standard(node.op_type, opset)
    if schema is None:
        raise _fault(node, f"ONNX has no such op in opset {opset}")
    if not schema.min_inputs <= len(node.inputs) <= schema.max_inputs:
        raise _fault(
            node, "has the wrong number of inputs", f"{schema.min_inputs} to {schema.max_inputs}", len(node.inputs)
        )
    if not schema.min_outputs <= len(node.outputs) <= schema.max_outputs:
        expected = f"{schema.min_outputs} to {schema.max_outputs}"
        raise _fault(node, "has the wrong number of outputs", expected, len(node.outputs))
    for attribute in node.attributes.values():
        expected_type = schema.attributes.get(attribute.name)
        if expected_type != attribute.type.name:
            what = f"ONNX does not have the attribute {attribute.name!r} like this"
            raise _fault(node, what, expected_type or ", ".join(schema.attributes), attribute.type.name)
    missing = sorted(schema.required - node.attributes.keys())
    if missing:
        raise _fault(node, f"lacks the attributes {', '.join(missing)}")
    bound: dict[str, tuple[str, str]] = {}
    _verify_types(node, node.inputs, schema.inputs, schema, bound)
    _verify_types(node, node.outputs, schema.outputs, schema, bound)


def _verify_types(
    node: ir.Node,
    values: Sequence[ir.Value | None],
    parameters: Sequence[_Parameter],
    schema: _Standard,
    bound: dict[str, tuple[str, str]],
) -> None:
    """Each type is allowed where it stands, and one type name (T) stands for one type: `bound` says for which."""
    for index, value in enumerate(values):
        parameter = parameters[min(index, len(parameters) - 1)]
        if value is None:
            if not parameter.optional and not parameter.variadic:
                raise _fault(node, f"lacks its input {parameter.name!r}, which ONNX requires")
            continue
        have = f"tensor({dtype_of(value).name.lower()})"
        allowed = schema.allowed[parameter.type_name]
        if have not in allowed:
            expected = ", ".join(sorted(allowed))
            raise _fault(node, f"ONNX does not allow the element type of {value.name!r} here", expected, have)
        if parameter.variadic and not parameter.one_type:
            continue
        first, other = bound.setdefault(parameter.type_name, (have, str(value.name)))
        if first != have:
            raise _fault(node, f"{value.name!r} and {other!r} must have one element type", first, have)
