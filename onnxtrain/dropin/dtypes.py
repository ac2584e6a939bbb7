"""Types of PyTorch and of ONNX in terms of each other."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

# What a traced graph calls them.
_SCALARS = {
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Short": torch.int16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Half": torch.float16,
    "Float": torch.float32,
    "Double": torch.float64,
    "ComplexHalf": torch.complex32,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "Bool": torch.bool,
    "BFloat16": torch.bfloat16,
    "QInt8": torch.qint8,
    "QUInt8": torch.quint8,
    "QInt32": torch.qint32,
}


def pytorch_scalar_type_to_pytorch_dtype(scalar_type: str) -> torch.dtype:
    """The type of a name such as "Float".

    Raises:
        RuntimeError: there is no such name.
    """
    if scalar_type not in _SCALARS:
        raise RuntimeError(f"Expected one of {', '.join(_SCALARS)}, got {scalar_type!r}.")
    return _SCALARS[scalar_type]


def pytorch_type_to_onnx_dtype(dtype_or_scalar_name: torch.dtype | str) -> int:
    """The number that ONNX has for a type of PyTorch, given as a type or as a name such as "Float".

    Raises:
        RuntimeError: ONNX has no such type.
    """
    given = dtype_or_scalar_name
    dtype = pytorch_scalar_type_to_pytorch_dtype(given) if isinstance(given, str) else given
    try:
        return tensor_adapters.from_torch_dtype(dtype).value
    except TypeError as error:
        raise RuntimeError(f"ONNX has no type for {dtype}.") from error


def onnx_dtype_to_pytorch_dtype(onnx_dtype: int) -> torch.dtype:
    """The type of PyTorch for a number of ONNX.

    Raises:
        RuntimeError: PyTorch has no such type.
    """
    try:
        return tensor_adapters.to_torch_dtype(ir.DataType(onnx_dtype))
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"PyTorch has no type for ONNX's {onnx_dtype}.") from error
