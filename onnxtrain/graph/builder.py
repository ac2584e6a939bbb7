"""Builds ONNX nodes in one line each, typed as they are made.

    op = Builder(graph, OPS)
    y = op.MatMul(x, w)                     # domain ai.onnx
    dx = op.ms.GeluGrad(dy, x)              # domain com.microsoft
    y = op.own.Linear(x, w, b)              # domain onnxtrain

Every output gets its element type and sizes from the op's definition, so a graph is typed at all times. The same
language writes what PyTorch's ops become, bodies, gradients and passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import ml_dtypes  # noqa: F401  # numpy learns bfloat16 from it
import numpy as np
import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import ATEN, MICROSOFT, ONNX, OWN, TensorType, dtype_of, set_type

Operand = ir.Value | None


class Schema(Protocol):
    """What a builder asks of an op's definition."""

    @property
    def attributes(self) -> Mapping[str, Any]: ...

    def output_types(self, node: ir.Node) -> Sequence[TensorType]: ...

    def output_count(self, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> int: ...


class Schemas(Protocol):
    """Where a builder finds definitions."""

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
        graph: where nodes go, at the end.
        origin: metadata that every node made from now on carries (module path, the user's source line).
        out: during capture, the types that PyTorch gave the outputs of the op being converted.
        device: during capture, the type of the device that they lie on.
        is_contiguous: during capture, tells whether all of them are contiguous in PyTorch: 0.3 ms, which few ask for.
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
        """The function that appends a node of this op: inputs by position, attributes by name.

        It returns the node's output, or a tuple where the op has several.
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
        """Appends a node. `types` are its outputs' types where the definition's shape rule cannot know them."""
        schema = self._schemas(domain, op_type)
        attributes = {name: value for name, value in attributes.items() if value is not None}
        if unknown := attributes.keys() - schema.attributes.keys():
            raise GraphError(f"{op_type} has no attribute {', '.join(sorted(unknown))}")
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
            raise GraphError(f"{op_type} has {len(node.outputs)} outputs, its shape rule gave {len(types)}")
        for value, tensor_type in zip(node.outputs, types, strict=True):
            set_type(value, tensor_type)
        return node

    @contextmanager
    def at(self, origin: Mapping[str, str]) -> Iterator[None]:
        """Nodes made inside carry `origin`: where in the user's model they come from."""
        before, self.origin = self.origin, dict(origin)
        try:
            yield
        finally:
            self.origin = before

    # Constants

    def constant(self, array: Any, dtype: ir.DataType) -> ir.Value:
        """A constant tensor; equal constants of one builder are one value."""
        data = np.asarray(array, dtype=dtype.numpy())
        key = (dtype, data.shape, data.tobytes())
        return self._known(key, lambda: data, TensorType(dtype, data.shape))

    def scalar(self, number: complex, like: ir.Value | ir.DataType) -> ir.Value:
        """A 0-dimensional constant of `like`'s element type.

        The exact Python number is kept beside it: PyTorch computes half-precision tensor × Python scalar with the
        unrounded scalar, and so do our kernels.
        """
        dtype = dtype_of(like) if isinstance(like, ir.Value) else like
        data = np.asarray(number, dtype=dtype.numpy())
        value = self._known((dtype, "scalar", repr(number)), lambda: data, TensorType(dtype, ()))
        value.meta["scalar"] = number
        return value

    def _known(self, key: Any, data: Callable[[], Any], tensor_type: TensorType) -> ir.Value:
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

    def sizes(self, wanted: Sequence[Size]) -> ir.Value:
        """These sizes as an int64 vector, as Reshape and Expand take them."""
        if all(isinstance(s, int) for s in wanted):
            return self.constant(list(wanted), ir.DataType.INT64)
        parts = [self._size_vector(size) for size in wanted]
        result: ir.Value = parts[0] if len(parts) == 1 else self.Concat(*parts, axis=0)
        result.meta["sizes"] = tuple(wanted)
        return result

    def size(self, wanted: Size, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """One size as a 0-dimensional tensor."""
        if isinstance(wanted, int):
            return self.scalar(wanted, dtype)
        value: ir.Value = self.Squeeze(self._size_vector(wanted), self.constant([0], ir.DataType.INT64))
        return value if dtype == ir.DataType.INT64 else self.Cast(value, to=dtype)

    def shape_of(self, value: ir.Value) -> ir.Value:
        """The shape of `value` as an int64 vector, from the graph's inputs: `value` itself is not read."""
        return self.sizes(sizes.dims_of(value))

    def _size_vector(self, size: Size) -> ir.Value:
        if isinstance(size, int):
            return self.constant([size], ir.DataType.INT64)
        known: dict[str, ir.Value] = self.graph.meta.setdefault("size_values", {})
        value = known.get(size)
        if value is None or value.graph is not self.graph:
            value = known[size] = self._compute_size(sizes.parse(size))
        return value

    def _compute_size(self, expr: Any) -> ir.Value:
        """Nodes that compute a size from the shapes of values whose dimension is a plain symbol."""
        if expr.is_Symbol:
            source, axis = self._source_of(str(expr))
            result: ir.Value = self.Shape(source, start=axis, end=axis + 1)
            result.name = f"size_{expr}"  # the same name in every graph made from one capture
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
            raise GraphError(f"the size {sizes.from_sympy(expr)} cannot be computed inside the graph ({head})")
        total = operands[0]
        for operand in operands[1:]:
            total = fold(total, operand)
        return total

    def _scaled_size(self, expr: Any) -> ir.Value:
        """floor(size * scale) in doubles: how PyTorch computes the sizes of interpolation."""
        factor, size = expr.args[0].as_coeff_Mul()
        if any(part.is_Float for part in size.atoms()):
            raise GraphError(f"the size {sizes.from_sympy(expr)} cannot be computed inside the graph")
        mantissa, exponent = math.frexp(factor)
        how = {"mantissa": int(math.ldexp(mantissa, 53)), "exponent": exponent - 53}
        result: ir.Value = self.own.ScaledSize(self._operand(size), **how)
        return result

    def _operand(self, expr: Any) -> ir.Value:
        return self._size_vector(sizes.from_sympy(expr))

    def _source_of(self, name: str) -> tuple[ir.Value, int]:
        """A value of the graph with a dimension that is exactly this symbol."""
        known: dict[str, tuple[ir.Value, int]] = self.graph.meta.setdefault("size_sources", {})
        if name not in known:
            for value in self.graph.inputs:
                _note_symbols(value, known)
        if name not in known:
            for node in self.graph:
                for value in node.outputs:
                    _note_symbols(value, known)
        if name not in known:
            raise GraphError(f"no value of the graph has the size {name}")
        return known[name]


def _attribute(name: str, value: Any) -> ir.Attr:
    """onnx_ir asks of a sequence first whether it is a graph, a tensor or a type, which takes it 15 µs."""
    is_ints = isinstance(value, (list, tuple)) and value and all(isinstance(number, int) for number in value)
    return ir.convenience.convert_attribute(name, value, ir.AttributeType.INTS if is_ints else None)


def _note_symbols(value: ir.Value, known: dict[str, tuple[ir.Value, int]]) -> None:
    if value.shape is None:
        return
    for axis, size in enumerate(sizes.dims_of(value)):
        if isinstance(size, str) and size.isidentifier():
            known.setdefault(size, (value, axis))


def as_sizes(value: ir.Value) -> Sizes | None:
    """The sizes that an int64 vector holds, where they are known before the graph runs."""
    if value.const_value is not None:
        return tuple(int(v) for v in value.const_value.numpy().reshape(-1))
    known: Sizes | None = value.meta.get("sizes")
    return known
