"""Convert an imported model node by node.

Ops in `converters` are rewritten with PyTorch's semantics; ops with a definition of the same name are kept. Any other
op becomes a foreign node (`ops/unknown_node.py`), which is refused later if a gradient must pass it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.device.from_onnx.converters import CONVERTERS, Source
from onnxtrain.device.from_onnx.prepare import constant_number
from onnxtrain.errors import ArtifactError, OnnxTrainError
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import ONNX, TensorType, dtype_of, rank_of, set_type
from onnxtrain.ops import OPS, builder, definition_of, unknown_node
from onnxtrain.ops.bodies import close
from onnxtrain.ops.definition import OPSET, OpDef
from onnxtrain.ops.symbolic_ints import known_ints
from onnxtrain.passes.fold_constants import evaluate

_MAX_FOLDED = 4096  # elements of a constant that is folded
_RESERVED = frozenset({"max", "min", "abs"})  # functions in dimension expressions


def convert(
    model: ir.Model, outputs: Sequence[str], parameters: Collection[str], updates: Mapping[str, str], *, training: bool
) -> ir.Model:
    """Convert a prepared model.

    Args:
        model: see `prepare`; not modified.
        outputs: the names of the values that become outputs.
        parameters: the initializers that become inputs of the graph, after those of the model.
        updates: for each buffer among them, the name of its new value; not needed for BatchNormalization.
        training: whether Dropout and BatchNormalization keep their training mode; otherwise both are in inference mode.

    Returns:
        A typed graph. In training its outputs are `outputs`, then `<b>.out` for each updated buffer b.

    Raises:
        ArtifactError: an op, a dtype or a shape is not supported in training graphs.
    """
    graph = ir.Graph([], [], nodes=[], opset_imports={ONNX: OPSET}, name=model.graph.name or "model")
    walk = _Walk(builder(graph), training, str(model.producer_name or ""), model.graph.opset_imports)
    walk.inputs(model.graph, parameters)
    for node in model.graph:
        walk.visit(node)
    updated = {buffer: walk.named(value) for buffer, value in updates.items()} | walk.updates
    order = [name for name in model.graph.initializers if name in updated]
    values = [*map(walk.named, outputs), *(updated[name] for name in order)]
    close(graph, values, [*outputs, *(f"{name}.out" for name in order)])
    traversal.name_uniquely(graph)
    graph.opset_imports.update({node.domain: 1 for node in graph if node.domain})
    return ir.Model(graph, ir_version=10, producer_name="onnxtrain")


class _Walk:
    def __init__(self, op: Builder, training: bool, producer: str, versions: Mapping[str, int]) -> None:
        self._versions = versions
        self.updates: dict[str, ir.Value] = {}
        self._op = op
        self._training = training
        self._producer = producer
        self._values: dict[ir.Value, ir.Value] = {}
        self._symbols: dict[str, str] = {}

    def inputs(self, graph: ir.Graph, parameters: Collection[str]) -> None:
        """Declare inputs, parameters and constants."""
        for value in graph.inputs:
            if value.name not in graph.initializers:
                self._declare(value, self._type(value, "the input"))
        missing = [name for name in parameters if name not in graph.initializers]
        if missing:
            raise ArtifactError("The model has no such parameters.", expected=_listed(graph.initializers), got=missing)
        for name, value in graph.initializers.items():
            if name in parameters:
                self._declare(value, _initializer_type(value))
            else:
                self._constant(value)

    def _declare(self, value: ir.Value, tensor_type: TensorType) -> None:
        declared = ir.Value(name=value.name)
        set_type(declared, tensor_type)
        self._op.graph.inputs.append(declared)
        self._values[value] = declared

    def _constant(self, value: ir.Value) -> None:
        constant = ir.Value(name=value.name, const_value=value.const_value)
        set_type(constant, _initializer_type(value))
        self._op.graph.register_initializer(constant)
        self._values[value] = constant

    def value(self, old: ir.Value) -> ir.Value:
        """Return the converted value of a value of the imported graph."""
        if old not in self._values:
            raise ArtifactError(f"The model reads {old.name!r}, which no node or input provides.")
        return self._values[old]

    def named(self, name: str) -> ir.Value:
        """Return the converted value of the value with this name."""
        for old, new in self._values.items():
            if old.name == name:
                return new
        raise ArtifactError("The model has no value of this name.", got=name)

    # Types

    def _type(self, value: ir.Value, role: str) -> TensorType:
        if isinstance(value.type, ir.SequenceType | ir.OptionalType):
            raise ArtifactError(
                f"A training graph supports only tensors, but {role} {value.name!r} is not one.",
                got=str(value.type),
                todo="export the model with one input for each tensor",
            )
        if value.dtype is None or value.shape is None or not isinstance(value.type, ir.TensorType):
            raise ArtifactError(
                f"The type or rank of {role} {value.name!r} is not known, or it is not a tensor.",
                got=str(value.type),
                todo="export the model with shapes (dimensions may be dynamic), or declare them by onnx's tools",
            )
        return TensorType(value.dtype, tuple(self._size(dim, value, i) for i, dim in enumerate(value.shape)))

    def _size(self, dim: int | ir.SymbolicDim, value: ir.Value, axis: int) -> Size:
        if isinstance(dim, int):
            return dim
        name = str(dim.value) if dim.value is not None else f"{value.name}_size_{axis}"
        if name not in self._symbols:
            symbol = re.sub(r"\W", "_", name, flags=re.ASCII)
            symbol = symbol if symbol[:1].isalpha() and symbol not in _RESERVED else f"d_{symbol}"
            while symbol in self._symbols.values():
                symbol += "_"
            self._symbols[name] = symbol
        return self._symbols[name]

    # Nodes

    def visit(self, node: ir.Node) -> None:
        if (node.domain, node.op_type) == (ONNX, "If"):
            self._branch(node)
            return
        inputs = [None if v is None or v.name == "" else self.value(v) for v in node.inputs]
        source = Source(self._op, node, inputs, self._training, self._producer, self.updates)
        before = len(self._op.graph)
        try:
            with self._op.at(_origin(node)):
                results = [self._propagate_constants(value) for value in self._convert(source)]
        except ArtifactError:
            raise
        except (OnnxTrainError, ValueError, TypeError, AttributeError) as error:
            problem = error.problem if isinstance(error, OnnxTrainError) else str(error)
            raise ArtifactError(
                f"{traversal.describe(node)} cannot be part of a training graph: {problem}",
                where=traversal.origin(node),
                got=getattr(error, "got", None),
                todo="replace the op before the export, or cut the model before it and train the rest",
            ) from error
        self._name(node, results, before)

    def _propagate_constants(self, value: ir.Value | None) -> ir.Value | None:
        """Fold a value computed from constants, and note the dimensions that a shape vector holds.

        Shapes must follow from the inputs' dimensions, and exporters compute them in many steps.
        """
        producer = None if value is None else value.producer()
        if value is None or producer is None:
            return value
        if all(v is None or v.const_value is not None for v in producer.inputs) and len(producer.outputs) == 1:
            return self._folded(value, producer)
        if value.dtype != ir.DataType.INT64 or rank_of(value) > 1:
            return value
        dims = known_ints(value)
        if dims is not None and all(isinstance(dim, int) for dim in dims):
            return self._op.constant(dims if rank_of(value) else dims[0], ir.DataType.INT64)
        if dims is not None and rank_of(value):
            value.meta["sizes"] = dims
        return value

    def _folded(self, value: ir.Value, producer: ir.Node) -> ir.Value:
        definition = definition_of(producer)
        count = sizes.multiply(1, *sizes.dims_of(value))
        if definition.effects or isinstance(count, str) or count > _MAX_FOLDED or not producer.inputs:
            return value
        (result,) = evaluate(producer, definition)
        array = result.float().numpy() if value.dtype == ir.DataType.BFLOAT16 else result.numpy()
        return self._op.constant(array, dtype_of(value))

    def _name(self, node: ir.Node, results: Sequence[ir.Value | None], before: int) -> None:
        added = list(self._op.graph)[before:] if len(self._op.graph) - before < 64 else []
        for old, new in zip(node.outputs, results, strict=False):
            if new is None:
                continue
            self._values[old] = new
            if new.producer() in added:
                _declare_sizes(new, old)
                new.name = old.name or new.name
        for index, new_node in enumerate(added):
            new_node.name = str(node.name) if len(added) == 1 else f"{node.name}/{new_node.op_type}_{index}"

    def _convert(self, source: Source) -> Sequence[ir.Value | None]:
        node = source.node
        convert = CONVERTERS.get(node.op_type) if node.domain == ONNX else None
        if convert is not None:
            return convert(source)
        definition = OPS.get((node.domain, node.op_type))
        attributes = None if definition is None else _attributes(node, definition)
        has_subgraphs = any(traversal.subgraphs(node))
        if definition is None or attributes is None or has_subgraphs or _has_undeclared_values(node, definition):
            return self._foreign(source)
        return self._op.node(node.domain, node.op_type, source.inputs, attributes).outputs

    def _foreign(self, source: Source) -> Sequence[ir.Value | None]:
        node = source.node
        if node.domain == ONNX and ("Sequence" in node.op_type or "Optional" in node.op_type):
            raise ArtifactError(
                f"A training graph supports only tensors, but {traversal.describe(node)} uses sequences or optionals.",
                where=traversal.origin(node),
                todo="export the model with other ops: Split for SplitToSequence, Concat for ConcatFromSequence",
            )
        if any(traversal.subgraphs(node)):
            raise ArtifactError(
                f"{traversal.describe(node)} has subgraphs (loops or branches), which have no gradient.",
                where=traversal.origin(node),
                todo="export the model without them: with a static shape, unrolled loops, in training mode",
            )
        types = [self._type(value, "the output") for value in node.outputs]
        version = self._versions.get(node.domain, 1)
        return unknown_node.wrap(self._op, node, source.inputs, types, version).outputs

    def _branch(self, node: ir.Node) -> None:
        """Replace an If with constant condition by its branch."""
        condition = None if node.inputs[0] is None else constant_number(self.value(node.inputs[0]))
        if condition is None:
            raise ArtifactError(
                f"{traversal.describe(node)} selects a branch by a tensor value, which has no gradient.",
                where=traversal.origin(node),
                todo="export the model without the condition, or write it as Where",
            )
        branch = node.attributes["then_branch" if condition else "else_branch"].as_graph()
        for value in branch.initializers.values():
            self._constant(value)
        for inner in branch:
            self.visit(inner)
        for old, new in zip(node.outputs, branch.outputs, strict=True):
            self._values[old] = self.value(new)


def _declare_sizes(value: ir.Value, imported: ir.Value) -> None:
    """Use static dimensions that the model declares in place of inferred expressions: x[-1:] has one row if it has any.

    The expression must have this value for large dimensions; otherwise the number is that of an example.
    """
    if value.shape is None or imported.shape is None or len(value.shape) != len(imported.shape):
        return
    pairs = zip(sizes.dims_of(value), imported.shape, strict=True)
    set_type(value, TensorType(dtype_of(value), tuple(_static_dim(dim, declared) for dim, declared in pairs)))


def _static_dim(size: Size, declared: int | ir.SymbolicDim) -> Size:
    large = {name: 10_007 + 101 * number for number, name in enumerate(sorted(sizes.symbols(size)))}
    return declared if isinstance(declared, int) and sizes.evaluate(size, large) == declared else size


def _initializer_type(value: ir.Value) -> TensorType:
    tensor = value.const_value
    if tensor is None:
        raise ArtifactError(f"The initializer {value.name!r} has no elements.")
    return TensorType(tensor.dtype, tuple(int(size) for size in tensor.shape.numpy()))


def _origin(node: ir.Node) -> dict[str, str]:
    return {"module": str(node.name)} if node.name else {}


def _listed(names: Collection[str]) -> str:
    names_text = ", ".join(list(names)[:20])
    return names_text if len(names) <= 20 else f"{names_text}, … ({len(names)} in all)"


def _attributes(node: ir.Node, definition: OpDef) -> dict[str, Any] | None:
    """Return the attributes for the definition.

    None if the node sets one that the definition lacks to a non-default value.
    """
    attributes = {name: a.value for name, a in node.attributes.items() if name in definition.attributes}
    if node.domain != ONNX:
        return attributes if len(attributes) == len(node.attributes) else None
    schema = onnx.defs.get_schema(node.op_type, OPSET, ONNX)
    for name, attribute in node.attributes.items():
        if name in attributes:
            continue
        declared = schema.attributes.get(name)
        default = None if declared is None else onnx.helper.get_attribute_value(declared.default_value)
        value = attribute.value.encode() if isinstance(attribute.value, str) else attribute.value
        if value != default:
            return None
    return attributes


def _has_undeclared_values(node: ir.Node, definition: OpDef) -> bool:
    """Return whether the node has inputs or used outputs that the definition lacks."""
    variadic = (names and names[-1].endswith("...") for names in (definition.inputs, definition.outputs))
    more_inputs, more_outputs = (bool(v) for v in variadic)
    used = [i for i, v in enumerate(node.outputs) if traversal.is_used(v)]
    return (len(node.inputs) > len(definition.inputs) and not more_inputs) or (
        bool(used) and used[-1] >= len(definition.outputs) and not more_outputs
    )
