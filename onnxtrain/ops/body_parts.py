"""Short expressions of standard ops that bodies, gradient rules and captures are written with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import dtype_of, type_of
from onnxtrain.ops.definition import NodeView


def cast(op: Builder, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Return `value` in element type `dtype`, without a node if it has this type."""
    if dtype_of(value) == dtype:
        return value
    return op.Cast(value, to=dtype)


def as_value(op: Builder, argument: Any, dtype: ir.DataType) -> ir.Value:
    """Return an argument of an ATen call (tensor, Python number or size) as a value of element type `dtype`."""
    if isinstance(argument, ir.Value):
        return cast(op, argument, dtype)
    if isinstance(argument, str):  # a symbolic size used as a number
        return op.size(argument, dtype)
    if isinstance(argument, int) and dtype.is_integer():  # 200 is -56 in int8, as in PyTorch
        argument = int(np.asarray(argument).astype(dtype.numpy()))
    return op.scalar(argument, dtype)


def promoted(op: Builder, *arguments: Any) -> tuple[ir.Value, ...]:
    """Return the operands of an ATen elementwise call in the type of its output, the type PyTorch computes in."""
    return tuple(as_value(op, a, op.out[0].dtype) for a in arguments)


def with_attributes(op: Builder, n: NodeView, **changed: Any) -> Sequence[ir.Value]:
    """Return the outputs of the same op on the same inputs, with some attributes changed."""
    attributes = {name: getattr(n, name) for name in n.definition.attributes}
    return op.node(n.node.domain, n.node.op_type, n.node.inputs, {**attributes, **changed}).outputs


def int64_vector(op: Builder, values: Sequence[int]) -> ir.Value:
    """Return a constant int64 vector."""
    return op.constant(list(values), ir.DataType.INT64)


def sum_over(op: Builder, x: ir.Value, axes: Sequence[int], *, keepdims: bool = True) -> ir.Value:
    """Sum x over `axes`; return x itself if there are none."""
    if not axes:
        return x
    return op.ReduceSum(x, int64_vector(op, axes), keepdims=int(keepdims))


def count_over(x: ir.Value, axes: Sequence[int]) -> Size:
    """Return the number of elements of x that are reduced to one over `axes`."""
    shape = sizes.dims_of(x)
    return sizes.multiply(1, *(shape[a] for a in axes))


def mean_over(op: Builder, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    """Average x over `axes`, which keep size 1; NaN (0/0) over no elements, as in PyTorch."""
    return op.Div(sum_over(op, x, axes), op.size(count_over(x, axes), dtype_of(x)))


def add_scalar(op: Builder, x: ir.Value, scalar: float) -> ir.Value:
    return op.Add(x, op.scalar(scalar, like=x))


def mul_scalar(op: Builder, x: ir.Value, scalar: float) -> ir.Value:
    return op.Mul(x, op.scalar(scalar, like=x))


def reshaped(op: Builder, x: ir.Value, shape: Sequence[Size]) -> ir.Value:
    """Reshape x, with as many elements; return x itself if it has this shape. A size of 0 means no elements.

    If only one size is symbolic, the shape is a constant with -1 at its position: no size arithmetic is needed.
    """
    shape = tuple(shape)
    if sizes.dims_of(x) == shape:
        return x
    symbolic = [i for i, s in enumerate(shape) if isinstance(s, str)]
    result: ir.Value
    if (
        len(symbolic) == 1
        and 0 not in shape
        and inferred_size(sizes.dims_of(x), shape, *symbolic) == shape[symbolic[0]]
    ):
        result = op.Reshape(x, int64_vector(op, [-1 if isinstance(s, str) else s for s in shape]))
    elif symbolic or 0 in shape:
        result = op.Reshape(x, op.sizes(shape), allowzero=1)
    else:
        result = op.Reshape(x, int64_vector(op, [s for s in shape if isinstance(s, int)]))
    return result


def inferred_size(source: Sizes, target: Sequence[Size], axis: int) -> Size:
    """Return the size of `target` at `axis` that gives as many elements as `source` has."""
    others = [s for i, s in enumerate(target) if i != axis]
    return sizes.floor_divide(sizes.multiply(1, *source), sizes.multiply(1, *others))


def empty_saved_value(op: Builder, saved: ir.Value) -> ir.Value:
    """Return an empty vector for an output that a kernel saves for backward and a body does not need."""
    zero = ir.tensor([0], dtype=dtype_of(saved))
    node = op.node("", "ConstantOfShape", (int64_vector(op, [0]),), {"value": zero}, [type_of(saved)])
    return node.outputs[0]
