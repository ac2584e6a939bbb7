"""`onnxruntime.training.utils.torch_type_map`."""

from onnxtrain.dropin.dtypes import (
    onnx_dtype_to_pytorch_dtype,
    pytorch_scalar_type_to_pytorch_dtype,
    pytorch_type_to_onnx_dtype,
)

__all__ = ["onnx_dtype_to_pytorch_dtype", "pytorch_scalar_type_to_pytorch_dtype", "pytorch_type_to_onnx_dtype"]
