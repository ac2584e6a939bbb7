"""Creation ops: ConstantOfShape and Range, which PyTorch's full, arange, eye and others become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import TensorType, dtype_of, is_float, rank_of
from onnxtrain.ops.body_parts import as_value, cast
from onnxtrain.ops.definition import DEVICE, Call, NodeView
from onnxtrain.ops.dtypes import ONNX_DTYPES, TORCH_DTYPES
from onnxtrain.ops.elementwise.copies import overwritten
from onnxtrain.ops.interfaces.element_formulas import ELEMENT_FORMULAS, Affine, Formula, FormulaOf, integers, truth
from onnxtrain.ops.reshape.dims import expanded, unsqueezed
from onnxtrain.ops.reshape.movement import define_movement
from onnxtrain.ops.symbolic_ints import known_ints, required_ints

# ConstantOfShape(shape, value): a tensor whose elements are all `value` (default: float32 0)


def filled(op: Builder, shape: Sequence[Size], value: complex, dtype: ir.DataType) -> ir.Value:
    """Return a tensor of this shape filled with a value."""
    tensor = ir.tensor(np.array([value]).astype(dtype.numpy()), dtype=dtype)
    return op.ConstantOfShape(op.sizes(shape), value=tensor)


def zeros_like(op: Builder, value: ir.Value) -> ir.Value:
    """Return zeros of a value's type; its elements are not read."""
    return filled(op, sizes.dims_of(value), 0, dtype_of(value))


def _fill_dtype(n: NodeView) -> ir.DataType:
    return ir.DataType.FLOAT if n.value is None else n.value.dtype


def _lower_fill(n: NodeView, shape: Any) -> Call:
    number = 0.0 if n.value is None else n.value.numpy().item()
    return Call(torch.full, shape, number, dtype=TORCH_DTYPES[_fill_dtype(n)], device=DEVICE)


def _capture_full(op: Builder, shape: Any, value: Any, **options: Any) -> ir.Value:
    """Capture `full`, `full_like` and `new_full`, with the type and shape of PyTorch's output."""
    dtype, out_shape = op.out[0]
    if isinstance(value, (str, ir.Value)):  # a symbolic size, or a 0-dimensional tensor
        return expanded(op, as_value(op, value, dtype), out_shape)
    return filled(op, out_shape, value, dtype)


def _capture_new_full(op: Builder, x: ir.Value, shape: Any, number: Any, **options: Any) -> ir.Value:
    return _capture_full(op, shape, number)


def _capture_fill(op: Builder, x: ir.Value, number: Any = 0) -> ir.Value:
    """Capture `x.fill_(number)` and `x.zero_()`, functionalized."""
    return overwritten(op, x, _capture_full(op, None, number))


def _capture_filled(number: int) -> Any:
    """Capture `zeros`, `ones` and their variants; uninitialized tensors are captured as zeros."""

    def capture(op: Builder, *arguments: Any, **options: Any) -> ir.Value:
        return filled(op, op.out[0].shape, number, op.out[0].dtype)

    return capture


_ZEROS = _capture_filled(0)
_ONES = _capture_filled(1)

CONSTANT_OF_SHAPE = define_movement(
    "ConstantOfShape",
    ("shape",),
    lambda n: (TensorType(_fill_dtype(n), required_ints(n.shape, "the shape of ConstantOfShape")),),
    _lower_fill,
    None,
    host_inputs=frozenset({0}),
    attributes={"value": None},
    from_torch={
        "aten.full.default": _capture_full,
        "aten.full_like.default": _capture_full,
        "aten.new_full.default": _capture_new_full,
        "aten.fill.Scalar": _capture_fill,
        "aten.fill.Tensor": _capture_fill,
        "aten.zero.default": _capture_fill,
        "aten.zeros.default": _ZEROS,
        "aten.zeros_like.default": _ZEROS,
        "aten.new_zeros.default": _ZEROS,
        "aten.empty.memory_format": _ZEROS,
        "aten.empty_like.default": _ZEROS,
        "aten.empty_permuted.default": _ZEROS,
        "aten.empty_strided.default": _ZEROS,
        "aten.new_empty.default": _ZEROS,
        "aten.new_empty_strided.default": _ZEROS,
        "aten.ones.default": _ONES,
        "aten.ones_like.default": _ONES,
        "aten.new_ones.default": _ONES,
    },
)


@ELEMENT_FORMULAS.implements(CONSTANT_OF_SHAPE)
def _fill_formula(n: NodeView, formula_of: FormulaOf) -> Formula | None:
    array = None if n.value is None else n.value.numpy()
    if array is None or array.dtype.kind not in "bi":
        return None
    rank = rank_of(n.y)
    return truth(bool(array.item()), rank) if array.dtype.kind == "b" else Affine(int(array.item()), (0,) * rank)


# Range(start, limit, delta): start, start + delta, …, excluding limit


def _integers(op: Builder, count: Size) -> ir.Value:
    """Return the integers from 0 on as an int64 vector."""
    return op.Range(op.size(0), op.size(count), op.size(1))


def _range_type(n: NodeView) -> Sequence[TensorType]:
    if is_float(dtype_of(n.start)):
        raise GraphError(
            "Range supports only integers",
            expected="an integer type",
            got=dtype_of(n.start).name,
            todo="scale and cast a range of integers",
        )
    (start,), (limit,), (delta,) = (
        required_ints(v, f"the {name} of Range")
        for name, v in (("start", n.start), ("limit", n.limit), ("delta", n.delta))
    )
    if delta == 0:
        raise GraphError("Range has no step", expected="a delta other than 0", got="0")
    if isinstance(delta, int) and delta < 0:
        start, limit, delta = limit, start, -delta
    span = sizes.subtract(limit, start)
    count = sizes.floor_divide(sizes.add(span, sizes.subtract(delta, 1)), delta)
    return (TensorType(dtype_of(n.start), (sizes.maximum(0, count),)),)


def _lower_range(n: NodeView, start: Any, limit: Any, delta: Any) -> Call:
    dtype = TORCH_DTYPES[dtype_of(n.start)]
    first, last, step = (known_ints(v) for v in (n.start, n.limit, n.delta))
    if first and last and step == (1,) and sizes.maximum(first[0], last[0]) == last[0]:
        return Call(torch.arange, start, limit, dtype=dtype, device=DEVICE)
    return Call(_range, start, limit, delta, dtype=dtype, device=DEVICE)


def _range(start: int, limit: int, delta: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return torch.arange, or an empty tensor for a limit before the start, for which torch.arange raises."""
    return torch.arange(start, start + len(range(start, limit, delta)) * delta, delta, dtype=dtype, device=device)


def _capture_arange(op: Builder, *bounds: Any, **options: Any) -> Any:
    """Capture `arange(end)`, `arange(start, end)` and `arange(start, end, step)`.

    Fractional bounds become a constant that PyTorch computes: its rounding determines the number of elements.
    """
    dtype, shape = op.out[0]
    start, limit, delta = (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    integral = [int(b) if isinstance(b, float) and b.is_integer() else b for b in (start, limit, delta)]
    if not any(isinstance(b, float) for b in integral):
        node = op.node("", "Range", [op.size(b) for b in integral], {}, types=[TensorType(ir.DataType.INT64, shape)])
        return cast(op, node.outputs[0], dtype)
    if any(isinstance(b, str) for b in integral):
        return NotImplemented
    return constant_tensor(op, torch.arange(start, limit, delta, dtype=TORCH_DTYPES[dtype]))


def constant_tensor(op: Builder, tensor: torch.Tensor) -> ir.Value:
    """Return a tensor that is computed at capture as a constant."""
    dtype = ONNX_DTYPES[tensor.dtype]
    array = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return op.constant(array, dtype)


def _capture_linspace(op: Builder, start: Any, end: Any, steps: Any, **options: Any) -> Any:
    if not all(isinstance(number, (int, float)) for number in (start, end, steps)):
        return NotImplemented
    return constant_tensor(op, torch.linspace(start, end, steps, dtype=TORCH_DTYPES[op.out[0].dtype]))


def _capture_eye(op: Builder, *arguments: Any, **options: Any) -> ir.Value:
    dtype, (rows, columns) = op.out[0]
    row = unsqueezed(op, _integers(op, rows), 1)
    column = unsqueezed(op, _integers(op, columns), 0)
    return cast(op, op.Equal(row, column), dtype)


def _capture_triangle(upper: bool) -> Any:
    """Capture `triu_indices` and `tril_indices` of a matrix with constant sizes."""

    def capture(op: Builder, rows: Any, columns: Any, offset: Any = 0, **options: Any) -> Any:
        if not all(isinstance(number, int) for number in (rows, columns, offset)):
            return NotImplemented
        build = torch.triu_indices if upper else torch.tril_indices
        return constant_tensor(op, build(rows, columns, offset, dtype=TORCH_DTYPES[op.out[0].dtype]))

    return capture


def _capture_scalar(op: Builder, number: Any, **options: Any) -> ir.Value:
    return as_value(op, number, op.out[0].dtype)


RANGE = define_movement(
    "Range",
    ("start", "limit", "delta"),
    _range_type,
    _lower_range,
    None,
    host_inputs=frozenset({0, 1, 2}),
    from_torch={
        "aten.arange.default": _capture_arange,
        "aten.arange.start": _capture_arange,
        "aten.arange.start_step": _capture_arange,
        "aten.linspace.default": _capture_linspace,
        "aten.eye.default": _capture_eye,
        "aten.eye.m": _capture_eye,
        "aten.triu_indices.default": _capture_triangle(True),
        "aten.tril_indices.default": _capture_triangle(False),
        "aten.scalar_tensor.default": _capture_scalar,
    },
)


@ELEMENT_FORMULAS.implements(RANGE)
def _range_formula(n: NodeView, formula_of: FormulaOf) -> Formula | None:
    start, delta = integers(n.start), integers(n.delta)
    return None if start is None or delta is None else Affine(start[0], (delta[0],))
