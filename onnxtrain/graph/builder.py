"""Build ONNX nodes, one line each, with output types inferred immediately.

    op = Builder(graph, OPS)
    y = op.MatMul(x, w)                     # domain ai.onnx
    dx = op.ms.GeluGrad(dy, x)              # domain com.microsoft
    y = op.own.Linear(x, w, b)              # domain onnxtrain

Every output gets its element type and shape from the op's definition, so a graph is typed at all times. Capture, op
bodies, gradient rules and passes all build their nodes with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  # registers bfloat16 with numpy
import numpy as np
import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import ATEN, MICROSOFT, ONNX, OWN, TensorType, dtype_of, set_type

Operand = ir.Value | None


class Schema(Protocol):
    """The part of an op's definition that a builder needs."""

    @property
    def attributes(self) -> Mapping[str, Any]: ...

    def output_types(self, node: ir.Node) -> Sequence[TensorType]: ...

    def output_count(self, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> int: ...


class Schemas(Protocol):
    """Looks up an op's definition by domain and name."""

    def __call__(self, domain: str, name: str, /) -> Schema: ...


class _Domain:
    def __init__(self, builder: Builder, domain: str) -> None:
        self._builder = builder
        self._domain = domain

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        return self._builder.op(self._domain, op_type)


class Builder:
    """Appends typed nodes to `graph`.

    Attributes:
        graph: the graph that nodes are appended to.
        origin: metadata of the nodes to come (module path, source location).
        out: during capture, the output types of the PyTorch op being converted.
        device: during capture, the device type of these outputs.
        is_contiguous: during capture, returns whether PyTorch's outputs are all contiguous. A function, because the
            answer takes 0.3 ms and few converters need it.
    """

    def __init__(self, graph: ir.Graph, schemas: Schemas) -> None:
        self.graph = graph
        self.origin: dict[str, str] = {}
        self.out: tuple[TensorType, ...] = ()
        self.device = "cpu"
        self.is_contiguous: Callable[[], bool] = lambda: True
        self.ms = _Domain(self, MICROSOFT)
        self.own = _Domain(self, OWN)
        self.aten = _Domain(self, ATEN)
        self._schemas = schemas
        self._constants: dict[Any, ir.Value] = {}

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        return self.op(ONNX, op_type)

    def op(self, domain: str, op_type: str) -> Callable[..., Any]:
        """Return a function that appends a node of this op, taking inputs by position and attributes by name.

        The function returns the node's output, or a tuple of several.
        """

        def append(*inputs: Operand, **attributes: Any) -> Any:
            outputs = self.node(domain, op_type, inputs, attributes).outputs
            return outputs[0] if len(outputs) == 1 else tuple(outputs)

        return append

    def node(
        self,
        domain: str,
        op_type: str,
        inputs: Sequence[Operand],
        attributes: Mapping[str, Any],
        types: Sequence[TensorType] | None = None,
    ) -> ir.Node:
        """Append a node. `types` overrides the output types that the definition infers."""
        schema = self._schemas(domain, op_type)
        attributes = {name: value for name, value in attributes.items() if value is not None}
        if unknown := attributes.keys() - schema.attributes.keys():
            attribute_names = ", ".join(schema.attributes) or "none"
            raise GraphError(
                f"unknown attributes of {op_type}", expected=attribute_names, got=", ".join(sorted(unknown))
            )
        node = ir.Node(
            domain,
            op_type,
            inputs,
            [_attribute(name, value) for name, value in attributes.items()],
            num_outputs=len(types) if types is not None else schema.output_count(inputs, attributes),
            metadata_props=dict(self.origin),
        )
        self.graph.append(node)
        types = schema.output_types(node) if types is None else types
        if len(types) != len(node.outputs):
            raise GraphError(
                f"shape inference of {op_type} returned the wrong number of types",
                expected=len(node.outputs),
                got=len(types),
            )
        for value, tensor_type in zip(node.outputs, types, strict=True):
            set_type(value, tensor_type)
        return node

    @contextmanager
    def at(self, origin: Mapping[str, str]) -> Iterator[None]:
        """Give the nodes made inside the block this `origin` in the user's model."""
        before, self.origin = self.origin, dict(origin)
        try:
            yield
        finally:
            self.origin = before

    # Constants

    def constant(self, array: Any, dtype: ir.DataType) -> ir.Value:
        """Return a constant tensor; equal constants of one builder share a value."""
        data = np.asarray(array, dtype=dtype.numpy())
        key = (dtype, data.shape, data.tobytes())
        return self._shared_constant(key, lambda: data, TensorType(dtype, data.shape))

    def scalar(self, number: complex, like: ir.Value | ir.DataType) -> ir.Value:
        """Return a 0-dimensional constant of `like`'s element type.

        The exact Python number is kept in its metadata: PyTorch multiplies a half-precision tensor by the unrounded
        Python scalar, and so do our kernels.
        """
        dtype = dtype_of(like) if isinstance(like, ir.Value) else like
        data = np.asarray(number, dtype=dtype.numpy())
        value = self._shared_constant((dtype, "scalar", repr(number)), lambda: data, TensorType(dtype, ()))
        value.meta["scalar"] = number
        return value

    def _shared_constant(self, key: Any, data: Callable[[], Any], tensor_type: TensorType) -> ir.Value:
        value = self._constants.get(key)
        if value is None or value.name not in self.graph.initializers:
            name = f"constant_{len(self.graph.initializers)}"
            while name in self.graph.initializers:
                name += "_"
            value = ir.Value(name=name, const_value=ir.Tensor(data(), dtype=tensor_type.dtype, name=name))
            set_type(value, tensor_type)
            self.graph.register_initializer(value)
            self._constants[key] = value
        return value

    # Sizes

    def sizes(self, dims: Sequence[Size]) -> ir.Value:
        """Return these sizes as an int64 vector, the form that Reshape and Expand take."""
        if all(isinstance(dim, int) for dim in dims):
            return self.constant(list(dims), ir.DataType.INT64)
        if len(dims) > 1:
            return self._shape_vector(tuple(dims))
        result = self._size_vector(dims[0])
        result.meta["sizes"] = tuple(dims)
        return result

    def _shape_vector(self, dims: Sizes) -> ir.Value:
        """Return one vector for all equal shapes of forward, and one for those of backward.

        A shape that backward recomputes need not be saved.
        """
        shapes: dict[tuple[Sizes, bool], ir.Value] = self.graph.meta.setdefault("shape_values", {})
        key = dims, "gradient_of" in self.origin
        value = shapes.get(key)
        if value is None or value.graph is not self.graph:
            value = shapes[key] = self.Concat(*map(self._size_vector, dims), axis=0)
            value.meta["sizes"] = dims
        return value

    def size(self, dim: Size, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """Return one size as a 0-dimensional tensor."""
        if isinstance(dim, int):
            return self.scalar(dim, dtype)
        value: ir.Value = self.Squeeze(self._size_vector(dim), self.constant([0], ir.DataType.INT64))
        return value if dtype == ir.DataType.INT64 else self.Cast(value, to=dtype)

    def shape_of(self, value: ir.Value) -> ir.Value:
        """Return the shape of `value` as an int64 vector, computed from the graph's inputs without reading `value`."""
        return self.sizes(sizes.dims_of(value))

    def _size_vector(self, size: Size) -> ir.Value:
        if isinstance(size, int):
            return self.constant([size], ir.DataType.INT64)
        size_values: dict[str, ir.Value] = self.graph.meta.setdefault("size_values", {})
        value = size_values.get(size)
        if value is None or value.graph is not self.graph:
            expr = sizes.parse(size)
            if expr.is_Integer:  # simpler than PyTorch's
                return self.constant([int(expr)], ir.DataType.INT64)
            value = size_values[size] = self._compute_size(expr)
        return value

    def _compute_size(self, expr: Any) -> ir.Value:
        """Compute a size from the shapes of values that have a plain symbol as a dimension."""
        if expr.is_Symbol:
            name = f"size_{expr}"  # stable across the graphs made from one capture
            shapes = (node.outputs[0] for node in self.graph if node.op_type == "Shape")
            if there := next((shape for shape in shapes if shape.name == name), None):
                return there  # of a copied graph, which has lost the table of sizes
            if (of_item := self._vector_of(str(expr))) is not None:
                return of_item
            source, axis = self._source_of(str(expr))
            result: ir.Value = self.Shape(source, start=axis, end=axis + 1)
            result.name = name
            return result
        head = type(expr).__name__
        if head == "floor" and any(part.is_Float for part in expr.atoms()):
            return self._scaled_size(expr)
        if head == "floor":
            numerator, denominator = expr.args[0].together().as_numer_denom()
            return self.own.FloorDivide(self._operand(numerator), self._operand(denominator))  # type: ignore[no-any-return]
        operands = [self._operand(argument) for argument in expr.args]
        if head == "Pow" and int(expr.args[1]) > 0:
            operands, head = [operands[0]] * int(expr.args[1]), "Mul"
        fold = {"Add": self.Add, "Mul": self.Mul, "Max": self.Max, "Min": self.Min, "Mod": self.Mod}.get(head)
        if fold is None:
            raise GraphError(
                f"the graph cannot compute the size {sizes.from_sympy(expr)}",
                expected="sums, products, powers, floor, max, min and remainders of dimensions",
                got=head,
            )
        total = operands[0]
        for operand in operands[1:]:
            total = fold(total, operand)
        return total

    def _scaled_size(self, expr: Any) -> ir.Value:
        """Compute floor(size * scale) in double precision, as PyTorch computes interpolated sizes."""
        factor, size = expr.args[0].as_coeff_Mul()
        if any(part.is_Float for part in size.atoms()):
            raise GraphError(
                f"the graph cannot compute the size {sizes.from_sympy(expr)}",
                expected="one floating-point factor of an integer expression",
                got=f"floating-point numbers inside {sizes.from_sympy(size)}",
            )
        mantissa, exponent = math.frexp(factor)
        scale = {"mantissa": int(math.ldexp(mantissa, 53)), "exponent": exponent - 53}
        result: ir.Value = self.own.ScaledSize(self._operand(size), **scale)
        return result

    def _operand(self, expr: Any) -> ir.Value:
        return self._size_vector(sizes.from_sympy(expr))

    def _vector_of(self, symbol: str) -> ir.Value | None:
        """Return the vector of a size that `tensor.item()` read, which no value need have as a dimension."""
        if not symbol.startswith("u"):
            return None
        values = (value for node in self.graph for value in node.outputs)
        return next((value for value in values if value.meta.get("sizes") == (symbol,)), None)

    def _source_of(self, name: str) -> tuple[ir.Value, int]:
        """Return a value of the graph, and its axis, whose dimension is exactly this symbol."""
        sources: dict[str, tuple[ir.Value, int]] = self.graph.meta.setdefault("size_sources", {})
        if name not in sources:
            for value in self.graph.inputs:
                _collect_symbols(value, sources)
        if name not in sources:
            for node in self.graph:
                for value in node.outputs:
                    _collect_symbols(value, sources)
        if name not in sources:
            raise GraphError(f"no value of the graph has the dimension {name}", got=", ".join(sources) or "no symbols")
        return sources[name]


def _attribute(name: str, value: Any) -> ir.Attr:
    """Convert to an attribute. Stating INTS saves 15 µs in onnx_ir, which tests graphs, tensors and types first."""
    is_ints = isinstance(value, (list, tuple)) and value and all(isinstance(number, int) for number in value)
    return ir.convenience.convert_attribute(name, value, ir.AttributeType.INTS if is_ints else None)


def _collect_symbols(value: ir.Value, sources: dict[str, tuple[ir.Value, int]]) -> None:
    if value.shape is None:
        return
    for axis, size in enumerate(sizes.dims_of(value)):
        if isinstance(size, str) and size.isidentifier():
            sources.setdefault(size, (value, axis))


def as_sizes(value: ir.Value) -> Sizes | None:
    """Return the sizes that an int64 vector holds, or None if they are not known at compile time."""
    if value.const_value is not None:
        return tuple(int(v) for v in value.const_value.numpy().reshape(-1))
    elements: Sizes | None = value.meta.get("sizes")
    return elements
