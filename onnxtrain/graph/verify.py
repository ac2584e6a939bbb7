"""The verifier: checks that a graph is well-formed, topologically ordered, typed as its ops declare, and valid ONNX.

It runs on the graph of every stage, so that a fault is reported at the pass that caused it instead of showing up as
wrong numbers. It raises the first fault, with the node, its origin in the user's model, and expected against got.
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
from onnxtrain.graph.signatures import attributes_key
from onnxtrain.graph.values import ONNX, TensorType, dtype_of, type_of
from onnxtrain.system.time_limit import check_time


class Definition(Protocol):
    """The part of an op's definition that the verifier needs."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Input names; `x?` is optional, `xs...` variadic."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Output names, marked as inputs are."""

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Attribute name -> default."""

    @property
    def required_attributes(self) -> frozenset[str]:
        """Names of the attributes without a default."""

    def output_types(self, node: ir.Node) -> Sequence[TensorType]:
        """Infer the output types."""


Definitions = Callable[[str, str], Definition]


def verify(graph: ir.Graph | ir.Model, definitions: Definitions, verified: set[Hashable] | None = None) -> None:
    """Check a graph and its subgraphs.

    Args:
        graph: the graph, or a model with one.
        definitions: (domain, op) -> definition; raises GraphError for an undefined op.
        verified: keys of nodes that passed earlier with these definitions and are not checked again; updated in place.

    Raises:
        GraphError: the first fault: a value that is read before it is produced or belongs to another graph; a missing
            or wrong type; an op, input, output or attribute unknown to the definition or to ONNX; a missing or
            duplicate name.
    """
    graph = graph.graph if isinstance(graph, ir.Model) else graph
    _verify_names(graph)
    opset = graph.opset_imports.get(ONNX, onnx.defs.onnx_opset_version())
    _Verifier(definitions, opset, set() if verified is None else verified).verify(graph, set())


def compatible(a: TensorType, b: TensorType) -> bool:
    """Return whether two types may be equal at run time.

    A symbolic size is compatible with any other, because the capture's guards may make them equal; two ints must match.
    """
    return (
        a.dtype == b.dtype
        and len(a.shape) == len(b.shape)
        and all(x == y or isinstance(x, str) or isinstance(y, str) for x, y in zip(a.shape, b.shape, strict=True))
    )


def format_type(tensor_type: TensorType) -> str:
    """Format a type for messages: `float[s0, 8]`."""
    return f"{tensor_type.dtype.name.lower()}[{', '.join(map(str, tensor_type.shape))}]"


_UNTYPED = object()  # in place of the key of a value without a type


class _Verifier:
    def __init__(self, definitions: Definitions, opset: int, verified: set[Hashable]) -> None:
        self._definitions = definitions
        self._opset = opset
        self._verified = verified
        self._keys: dict[ir.Value, Hashable] = {}  # see `_value_key`

    def verify(self, graph: ir.Graph, outer: set[ir.Value]) -> None:
        """Check a graph whose nodes may read the values of `outer`."""
        for value in graph.inputs:
            _verify_typed(value, "the graph input", graph.name)
        for value in graph.initializers.values():
            _verify_initializer(value, graph.name)
        ready = {*outer, *graph.inputs, *graph.initializers.values()}
        for node in graph:
            check_time()
            for read in node.inputs:
                if read is not None and read not in ready:
                    raise _not_ready(node, read, graph)
            for inner in traversal.subgraphs(node) if traversal.has_subgraphs(node) else ():
                self.verify(inner, ready)
            self._verify_once(node)
            ready.update(node.outputs)
        for value in graph.outputs:
            if value not in ready:
                raise GraphError(f"no node of the graph produces the output {value.name!r}", where=graph.name)

    def _verify_once(self, node: ir.Node) -> None:
        """Check a node unless an equal one passed: of the 3200 nodes of a six-layer T5, 170 are distinct."""
        key = self._key(node)
        if key is None or key not in self._verified:
            self._verify_node(node)
            if key is not None:
                self._verified.add(key)

    def _key(self, node: ir.Node) -> Hashable | None:
        """Return a key of everything that the checks of a node depend on; None if it is too expensive to compare."""
        attributes = attributes_key(node)
        if attributes is None:
            return None
        inputs = tuple(None if value is None else self._value_key(value) for value in node.inputs)
        outputs = tuple(map(self._value_key, node.outputs))
        if _UNTYPED in inputs or _UNTYPED in outputs:
            return None
        return self._opset, node.domain, node.op_type, attributes, inputs, outputs

    def _value_key(self, value: ir.Value) -> Hashable:
        """Return a key of a value's type and data, or `_UNTYPED`; cached, because several nodes read a value.

        An inferred shape may depend on the nodes that compute sizes and axes.
        """
        key = self._keys.get(value)
        if key is None:
            dtype = value.dtype
            if dtype is None or value.shape is None:
                return _UNTYPED
            dims, constant = sizes.dims_of(value), value.const_value
            is_integers = constant is None and dtype is ir.DataType.INT64 and len(dims) <= 1
            key = self._keys[value] = (dtype, dims, self._key_of_integers(value) if is_integers else constant)
        return key

    def _key_of_integers(self, value: ir.Value) -> Hashable:
        node = value.producer()
        attributes = None if node is None else attributes_key(node)
        if node is None or attributes is None or any(v is None or v.shape is None for v in node.inputs):
            return value  # by identity
        inputs = tuple(self._value_key(v) for v in node.inputs if v is not None)
        return node.domain, node.op_type, attributes, inputs, value.index(), value.meta.get("sizes")

    def _verify_node(self, node: ir.Node) -> None:
        try:
            definition = self._definitions(node.domain, node.op_type)
        except GraphError as error:
            raise _fault(node, error.problem, todo="define the op, or fix the pass that creates it") from error
        for value in node.outputs:
            if value.dtype is None or value.shape is None:
                raise _fault(node, f"output {value.name!r} has no type")
        _verify_inputs(node, definition)
        _verify_attributes(node, definition)
        _verify_outputs(node, definition)
        if node.domain == ONNX:
            verify_standard(node, self._opset)


def _fault(
    node: ir.Node, problem: str, expected: object = None, got: object = None, todo: str | None = None
) -> GraphError:
    return GraphError(f"{traversal.describe(node)}: {problem}", traversal.origin(node), expected, got, todo)


def _not_ready(node: ir.Node, value: ir.Value, graph: ir.Graph) -> GraphError:
    producer = value.producer()
    if producer is not None and producer.graph is graph:
        got = f"the producer {traversal.describe(producer)} comes later"
    elif producer is not None and producer.graph is None:
        got = f"the producer {traversal.describe(producer)} was removed from the graph"
    elif producer is not None:
        got = f"the producer {traversal.describe(producer)} belongs to another graph"
    else:
        got = "a value without producer that is neither an input nor an initializer of the graph"
    return _fault(node, f"reads {value.name!r} before it is produced", "a value of an earlier node", got)


def _verify_names(graph: ir.Graph) -> None:
    values: list[str | None] = [v.name for v in dict.fromkeys((*graph.inputs, *graph.initializers.values()))]
    nodes: list[str | None] = []
    for node in traversal.all_nodes(graph):
        nodes.append(node.name)
        values += [value.name for value in node.outputs]
    for kind, names in (("values", values), ("nodes", nodes)):
        if not all(names):
            raise GraphError(f"{sum(not name for name in names)} {kind} have no name", where=graph.name)
        if len(set(names)) == len(names):
            continue
        duplicates = sorted(str(name) for name, count in Counter(names).items() if count > 1)
        if duplicates:
            raise GraphError(f"duplicate names of {kind}", where=graph.name, got=", ".join(duplicates))


def _verify_typed(value: ir.Value, role: str, where: str | None) -> None:
    if value.dtype is None or value.shape is None:
        raise GraphError(f"{role} {value.name!r} has no type", where=where)


def _verify_initializer(value: ir.Value, where: str | None) -> None:
    _verify_typed(value, "the initializer", where)
    tensor = value.const_value
    if tensor is None:
        raise GraphError(f"the initializer {value.name!r} has no data", where=where)
    data_type = TensorType(tensor.dtype, tuple(int(size) for size in tensor.shape.numpy()))
    if data_type != type_of(value):
        raise GraphError(
            f"the data of the initializer {value.name!r} does not have the value's type",
            where=where,
            expected=format_type(type_of(value)),
            got=format_type(data_type),
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
            raise _fault(node, f"lacks the required input {name!r}", ", ".join(declared))
    for value in node.inputs:
        if value is not None and (value.dtype is None or value.shape is None):
            raise _fault(node, f"input {value.name!r} has no type")


def _verify_attributes(node: ir.Node, definition: Definition) -> None:
    unknown = sorted(node.attributes.keys() - definition.attributes.keys())
    if unknown:
        attribute_names = ", ".join(definition.attributes) or "none"
        raise _fault(node, "has unknown attributes", attribute_names, ", ".join(unknown))
    missing = sorted(definition.required_attributes - node.attributes.keys())
    if missing:
        raise _fault(node, f"lacks the required attributes {', '.join(missing)}")


def _verify_outputs(node: ir.Node, definition: Definition) -> None:
    declared = definition.outputs
    needed = sum(not name.endswith(("?", "...")) for name in declared)
    if len(node.outputs) < needed or (len(node.outputs) > len(declared) and not declared[-1].endswith("...")):
        raise _fault(node, "has the wrong number of outputs", ", ".join(declared), len(node.outputs))
    try:
        types = definition.output_types(node)
    except Exception as error:
        raise _fault(node, f"shape inference failed: {error}") from error
    if len(types) < len(node.outputs):
        raise _fault(node, "has more outputs than shape inference returns", len(types), len(node.outputs))
    for value, inferred in zip(node.outputs, types, strict=False):
        expected, got = TensorType(*inferred), type_of(value)
        if not compatible(got, expected):
            raise _fault(node, f"output {value.name!r} has the wrong type", format_type(expected), format_type(got))


# Against ONNX


@dataclass(frozen=True)
class _Parameter:
    """One declared input or output of a standard op."""

    name: str
    type_name: str
    optional: bool
    variadic: bool
    homogeneous: bool  # of a variadic: whether all members have the same type


@dataclass(frozen=True)
class _OnnxSchema:
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
def _onnx_schema(op_type: str, opset: int) -> _OnnxSchema | None:
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    allowed = {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints}
    inputs, outputs = (tuple(map(_parameter, formals)) for formals in (schema.inputs, schema.outputs))
    for parameter, formal in zip((*inputs, *outputs), (*schema.inputs, *schema.outputs), strict=True):
        allowed.setdefault(parameter.type_name, frozenset(formal.types))
    return _OnnxSchema(
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
    """Check a node of a standard op against ONNX's schema: inputs, outputs, attributes, type constraints.

    Raises:
        GraphError: the node is invalid in this opset.
    """
    schema = _onnx_schema(node.op_type, opset)
    if schema is None:
        raise _fault(node, f"not an ONNX op of opset {opset}")
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
            problem = f"attribute {attribute.name!r} does not match ONNX's schema"
            raise _fault(node, problem, expected_type or ", ".join(schema.attributes), attribute.type.name)
    missing = sorted(schema.required - node.attributes.keys())
    if missing:
        raise _fault(node, f"lacks the required attributes {', '.join(missing)}")
    bound: dict[str, tuple[str, str]] = {}
    _verify_types(node, node.inputs, schema.inputs, schema, bound)
    _verify_types(node, node.outputs, schema.outputs, schema, bound)


def _verify_types(
    node: ir.Node,
    values: Sequence[ir.Value | None],
    parameters: Sequence[_Parameter],
    schema: _OnnxSchema,
    bound: dict[str, tuple[str, str]],
) -> None:
    """Check that each type is allowed for its parameter and that a type variable (T) has one type, kept in `bound`."""
    for index, value in enumerate(values):
        parameter = parameters[min(index, len(parameters) - 1)]
        if value is None:
            if not parameter.optional and not parameter.variadic:
                raise _fault(node, f"lacks the input {parameter.name!r}, which ONNX requires")
            continue
        got = f"tensor({dtype_of(value).name.lower()})"
        allowed = schema.allowed[parameter.type_name]
        if got not in allowed:
            expected = ", ".join(sorted(allowed))
            raise _fault(node, f"ONNX does not allow the element type of {value.name!r} here", expected, got)
        if parameter.variadic and not parameter.homogeneous:
            continue
        first, other = bound.setdefault(parameter.type_name, (got, str(value.name)))
        if first != got:
            raise _fault(node, f"{value.name!r} and {other!r} must have the same element type", first, got)
