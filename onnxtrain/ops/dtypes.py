"""Element types in PyTorch and in ONNX, and the types that ops compute in."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import dtype_of, rank_of

TORCH_DTYPES: dict[ir.DataType, torch.dtype] = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.UINT32: torch.uint32,  # for bit masks: PyTorch supports few operators on it
    ir.DataType.BOOL: torch.bool,
    ir.DataType.COMPLEX64: torch.complex64,
    ir.DataType.COMPLEX128: torch.complex128,
}


ONNX_DTYPES: dict[torch.dtype, ir.DataType] = {t: o for o, t in TORCH_DTYPES.items()}


def comparison_dtype(op: Builder, a: ir.Value, b: Any) -> ir.DataType:
    """Return the type in which PyTorch compares a with b, by its own promotion rule on empty tensors."""
    operands = [
        torch.empty((1,) * rank_of(v), dtype=TORCH_DTYPES[dtype_of(v)]) if isinstance(v, ir.Value) else v
        for v in (a, 0 if isinstance(b, str) else b)
    ]
    return ONNX_DTYPES[torch.result_type(operands[0], operands[1])]


def accumulation_dtype(dtype: ir.DataType) -> ir.DataType:
    """Return the type in which norms and losses of `dtype` are computed and saved for backward: float32 or double."""
    return ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
