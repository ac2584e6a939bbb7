"""Types of values (element type and shape), their constants, and axis arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.sizes import Sizes

ONNX = ""
MICROSOFT = "com.microsoft"
OWN = "onnxtrain"
ATEN = "org.pytorch.aten"


class TensorType(NamedTuple):
    """Element type and shape of a tensor."""

    dtype: ir.DataType
    shape: Sizes


_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_COMPLEX = frozenset({ir.DataType.COMPLEX64, ir.DataType.COMPLEX128})


def is_float(dtype: ir.DataType) -> bool:
    return dtype in _FLOATS


def is_differentiable_type(dtype: ir.DataType) -> bool:
    """Return whether a PyTorch tensor of this type can require a gradient: floating or complex."""
    return dtype in _FLOATS or dtype in _COMPLEX


def dtype_of(value: ir.Value) -> ir.DataType:
    dtype = value.dtype
    if dtype is None:
        raise ValueError(f"the element type of {value.name} is unknown")
    return dtype


def type_of(value: ir.Value) -> TensorType:
    return TensorType(dtype_of(value), sizes.dims_of(value))


def rank_of(value: ir.Value) -> int:
    """Return the number of a value's dimensions. Raises ValueError if the shape is unknown."""
    return len(value.shape) if value.shape is not None else len(sizes.dims_of(value))


def set_type(value: ir.Value, tensor_type: TensorType) -> None:
    value.type = ir.TensorType(tensor_type.dtype)
    value.shape = sizes.shape(tensor_type.shape)


def constant_of(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """Return the value's data if it is a constant, else None."""
    if value is None or value.const_value is None:
        return None
    return value.const_value.numpy()


def normalize_axis(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def normalize_axes(axes: Iterable[int], rank: int) -> tuple[int, ...]:
    return tuple(sorted(normalize_axis(a, rank) for a in axes))
