"""Convert dtypes between PyTorch and ONNX."""

from __future__ import annotations

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters

# By their names in TorchScript graphs.
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
    """Return the dtype of a TorchScript name such as "Float".

    Raises:
        RuntimeError: there is no such name.
    """
    if scalar_type not in _SCALARS:
        raise RuntimeError(f"Expected one of {', '.join(_SCALARS)}, got {scalar_type!r}.")
    return _SCALARS[scalar_type]


def pytorch_type_to_onnx_dtype(dtype_or_scalar_name: torch.dtype | str) -> int:
    """Return the `onnx.TensorProto.DataType` of a PyTorch dtype, or of a TorchScript name such as "Float".

    Raises:
        RuntimeError: ONNX has no such dtype.
    """
    dtype = dtype_or_scalar_name
    if isinstance(dtype, str):
        dtype = pytorch_scalar_type_to_pytorch_dtype(dtype)
    try:
        return tensor_adapters.from_torch_dtype(dtype).value
    except TypeError as error:
        raise RuntimeError(f"Expected a dtype that ONNX has too, got {dtype}.") from error


def onnx_dtype_to_pytorch_dtype(onnx_dtype: int) -> torch.dtype:
    """Return the PyTorch dtype of an `onnx.TensorProto.DataType`.

    Raises:
        RuntimeError: PyTorch has no such dtype.
    """
    try:
        return tensor_adapters.to_torch_dtype(ir.DataType(onnx_dtype))
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"Expected an ONNX dtype that PyTorch has too, got {onnx_dtype}.") from error
