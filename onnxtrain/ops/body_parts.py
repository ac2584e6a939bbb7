"""Short expressions of standard ops that bodies, gradient rules and captures are written with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import dtype_of, type_of
from onnxtrain.ops.definition import NodeView


def cast(op: Builder, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    """`value` in element type `dtype`: itself where it has it."""
    if dtype_of(value) == dtype:
        return value
    result: ir.Value = op.Cast(value, to=dtype)
    return result


def as_value(op: Builder, argument: Any, dtype: ir.DataType) -> ir.Value:
    """A tensor argument or a Python number or size of an ATen call, as a value of element type `dtype`."""
    if isinstance(argument, ir.Value):
        return cast(op, argument, dtype)
    if isinstance(argument, str):  # a symbolic size used as a number
        return op.size(argument, dtype)
    if isinstance(argument, int) and dtype.is_integer():  # 200 is -56 in int8, as in PyTorch
        argument = int(np.asarray(argument).astype(dtype.numpy()))
    return op.scalar(argument, dtype)


def promoted(op: Builder, *arguments: Any) -> tuple[ir.Value, ...]:
    """The operands of an ATen elementwise call in the type that PyTorch computes in: that of its output."""
    return tuple(as_value(op, a, op.out[0].dtype) for a in arguments)


def with_attributes(op: Builder, n: NodeView, **changed: Any) -> Sequence[ir.Value]:
    """The outputs of the same op of the same inputs with other attributes."""
    attributes = {name: getattr(n, name) for name in n.definition.attributes}
    return op.node(n.node.domain, n.node.op_type, n.node.inputs, {**attributes, **changed}).outputs


def int64_vector(op: Builder, axes: Sequence[int]) -> ir.Value:
    return op.constant(list(axes), ir.DataType.INT64)


def sum_over(op: Builder, x: ir.Value, axes: Sequence[int], *, keepdims: bool = True) -> ir.Value:
    """Sums x over `axes`; over none, x itself."""
    if not axes:
        return x
    result: ir.Value = op.ReduceSum(x, int64_vector(op, axes), keepdims=int(keepdims))
    return result


def count_over(x: ir.Value, axes: Sequence[int]) -> Size:
    """How many elements of x are summed into one over `axes`."""
    shape = sizes.dims_of(x)
    return sizes.multiply(1, *(shape[a] for a in axes))


def mean_over(op: Builder, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    """Averages x over `axes`, which stay with size 1: 0/0 where there is nothing to average, as in PyTorch."""
    result: ir.Value = op.Div(sum_over(op, x, axes), op.size(count_over(x, axes), dtype_of(x)))
    return result


def add_scalar(op: Builder, x: ir.Value, number: float) -> ir.Value:
    result: ir.Value = op.Add(x, op.scalar(number, like=x))
    return result


def mul_scalar(op: Builder, x: ir.Value, number: float) -> ir.Value:
    result: ir.Value = op.Mul(x, op.scalar(number, like=x))
    return result


def reshaped(op: Builder, x: ir.Value, wanted_sizes: Sequence[Size]) -> ir.Value:
    """Gives x these sizes; 0 means no elements."""
    result: ir.Value = op.Reshape(x, op.sizes(list(wanted_sizes)), allowzero=1)
    return result


def empty_saved_value(op: Builder, kept: ir.Value) -> ir.Value:
    """An empty vector in the place of what a kernel keeps for backward."""
    zero = ir.tensor([0], dtype=dtype_of(kept))
    node = op.node("", "ConstantOfShape", (int64_vector(op, [0]),), {"value": zero}, [type_of(kept)])
    result: ir.Value = node.outputs[0]
    return result
