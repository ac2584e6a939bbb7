"""What the attention ops share: heads that share keys and values, masks, and the scale of the scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import constant_of, dtype_of, rank_of
from onnxtrain.ops.constructors import cast, with_attributes
from onnxtrain.ops.definition import NodeView, ScalarFactor
from onnxtrain.ops.elementwise.arithmetic import number_of
from onnxtrain.ops.index.fill import filled
from onnxtrain.ops.matmul import constant_axes, is_exact_attribute, takes_factor

_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def accumulated(dtype: ir.DataType) -> ir.DataType:
    """The element type in which scores and their sums are held."""
    return ir.DataType.FLOAT if dtype in _HALF else dtype


def groups_of(q: ir.Value, k: ir.Value) -> Size:
    """How many heads of q share one of k."""
    if rank_of(q) < 3 or sizes.dims_of(q)[-3] == sizes.dims_of(k)[-3]:
        return 1
    return sizes.floor_divide(sizes.dims_of(q)[-3], sizes.dims_of(k)[-3])


def repeated(op: Builder, value: ir.Value, groups: Size) -> ir.Value:
    """Each head [..., g, s, e] repeated in place: [..., g * groups, s, e]."""
    if groups == 1:
        return value
    *batch, heads, rows, columns = sizes.dims_of(value)
    spread = op.Unsqueeze(value, constant_axes(op, len(batch) + 1))
    spread = op.Expand(spread, op.sizes([*batch, heads, groups, rows, columns]))
    result: ir.Value = op.Reshape(spread, op.sizes([*batch, sizes.multiply(heads, groups), rows, columns]), allowzero=1)
    return result


def unrepeated(op: Builder, value: ir.Value) -> tuple[ir.Value, Size]:
    """The heads [..., g, s, e] that `value` repeats in place, and how often; `value` and 1 where it repeats none.

    Models write it as Expand and Reshape, then autocast as Cast. Its gradient would be summed in the narrow type.
    """
    source = input_of(value, "Cast") or value
    spread = input_of(source, "Reshape")
    spread = spread and (input_of(spread, "Clone") or spread)
    narrow = spread and input_of(spread, "Expand")
    if spread is None or narrow is None or rank_of(narrow) != rank_of(source) + 1 or rank_of(spread) < 4:
        return value, 1
    *batch, heads, groups, rows, columns = sizes.dims_of(spread)
    if sizes.dims_of(narrow) != (*batch, heads, 1, rows, columns):
        return value, 1
    if sizes.dims_of(source) != (*batch, sizes.multiply(heads, groups), rows, columns):
        return value, 1
    return cast(op, op.Squeeze(narrow, constant_axes(op, len(batch) + 1)), dtype_of(value)), groups


def input_of(value: ir.Value, op_type: str) -> ir.Value | None:
    """The first input of the node that gives `value`, where it is one of this type."""
    node = value.producer()
    return node.inputs[0] if node is not None and node.op_type == op_type else None


def causal_mask(op: Builder, rows: Size, columns: Size, dtype: ir.DataType) -> ir.Value:
    """The additive mask [rows, columns] that lets a row see the columns up to its own number."""
    seen = op.Trilu(filled(op, [rows, columns], 1, ir.DataType.BOOL), upper=0)
    return additive(op, seen, dtype)


def hides_later(mask: ir.Value | None) -> bool:
    """Whether this is such a mask, or the bool one that it is made from: then a kernel needs no mask to do the same."""
    if mask is None or any(size != 1 for size in sizes.dims_of(mask)[:-2]):
        return False
    array = constant_of(mask)
    if array is not None:
        shown = np.tril(np.ones(array.shape[-2:], bool))
        wanted = shown if array.dtype == bool else np.where(shown, 0.0, -np.inf)
        return array.size > 0 and bool((array == wanted).all())
    node = mask.producer()
    if node is None:
        return False
    if node.op_type == "Where":
        numbers = [None if v is None else number_of(v) for v in node.inputs[1:]]
        return numbers == [0.0, -math.inf] and hides_later(node.inputs[0])
    if node.op_type != "Trilu" or len(node.inputs) > 1 or dtype_of(mask) != ir.DataType.BOOL:
        return False
    upper, ones = node.attributes.get_int("upper", 1), node.inputs[0].producer() if node.inputs[0] else None
    return not upper and ones is not None and ones.op_type == "ConstantOfShape" and _fill_of(ones) == 1


def _fill_of(node: ir.Node) -> float:
    value = node.attributes.get("value")
    return 0.0 if value is None else float(value.as_tensor().numpy().item())


def additive(op: Builder, mask: ir.Value, dtype: ir.DataType) -> ir.Value:
    """A bool mask, true where a column is seen, as what is added to scores."""
    result: ir.Value = op.Where(mask, op.scalar(0.0, dtype), op.scalar(-math.inf, dtype))
    return result


def with_attribute(op: Builder, q: ir.Value, scale: float | None) -> tuple[ir.Value, float | None]:
    """A scale that is neither the default nor exact as an attribute moves into q."""
    if scale is None or _is_default(scale, sizes.dims_of(q)[-1]):
        return q, None
    if is_exact_attribute(scale):
        return q, float(scale)
    return op.Mul(q, op.scalar(scale, like=q)), 1.0


def _is_default(scale: float, width: Size) -> bool:
    return isinstance(width, int) and width > 0 and math.isclose(scale, 1 / math.sqrt(width), rel_tol=1e-15)


def scores_factor(n: NodeView) -> ScalarFactor:
    """A number that multiplies queries or keys multiplies the scores."""
    return ScalarFactor(frozenset({"q", "k"}), False, _scores_scaled)


def _scores_scaled(op: Builder, n: NodeView, number: float) -> Sequence[ir.Value] | None:
    width, scale = sizes.dims_of(n.q)[-1], n.scale
    if scale is None:
        if not isinstance(width, int) or not width:
            return None
        scale = 1 / math.sqrt(width)
    scale *= number
    if _is_default(scale, width):
        return with_attributes(op, n, scale=None)
    return with_attributes(op, n, scale=scale) if takes_factor(dtype_of(n.q), scale) else None


def scale_of(op: Builder, q: ir.Value, scale: float | None, power: float = 1.0) -> ir.Value:
    """The `power` of the scale as a 0-dimensional value of q's type."""
    width = sizes.dims_of(q)[-1]
    if scale is None and isinstance(width, str):
        exponent = op.scalar(-power / 2, ir.DataType.DOUBLE)
        return cast(op, op.Pow(op.size(width, ir.DataType.DOUBLE), exponent), dtype_of(q))
    number = scale if scale is not None else 1 / math.sqrt(int(width)) if width else math.inf
    return op.scalar(math.copysign(math.sqrt(abs(number)) if power == 0.5 else abs(number), number), like=q)


def summed_heads(op: Builder, gradient: ir.Value, value: ir.Value) -> ir.Value:
    """The gradients of heads that share one of `value`, summed."""
    batch, heads, rows, columns = sizes.dims_of(value)
    groups = groups_of(gradient, value)
    if groups != 1:
        split = op.Reshape(gradient, op.sizes([batch, heads, groups, rows, columns]), allowzero=1)
        gradient = op.ReduceSum(split, constant_axes(op, 2), keepdims=0)
    return cast(op, gradient, dtype_of(value))


def scale_number(scale: float | None, q: torch.Tensor) -> float:
    """The scale of a kernel's scores."""
    if scale is not None:
        return scale
    return 1 / math.sqrt(q.size(-1)) if q.size(-1) else math.inf


def dropped(op: Builder, n: NodeView, x: ir.Value) -> ir.Value:
    """What the dropout of a gradient's node lets through of x: all of it, where it has none."""
    if n.noise is None:
        return x
    result: ir.Value = op.ms.DropoutGrad(x, n.noise, n.ratio, op.scalar(True, ir.DataType.BOOL))
    return result


def product_gradients(
    op: Builder, ds: ir.Value, p: ir.Value, dy: ir.Value, q: ir.Value, k: ir.Value, scale: float | None
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """dq, and dk and dv for each head of q, from the gradient `ds` of the scores and the probabilities that y is of."""
    scaled = op.Mul(ds, scale_of(op, q, scale))
    return op.MatMul(scaled, k), op.ms.FusedMatMul(scaled, q, transA=1), op.ms.FusedMatMul(p, dy, transA=1)
