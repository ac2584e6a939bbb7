"""`onnxruntime.training.utils`."""

from onnxtrain.dropin.dtypes import (
    onnx_dtype_to_pytorch_dtype,
    pytorch_scalar_type_to_pytorch_dtype,
    pytorch_type_to_onnx_dtype,
)
from onnxtrain.dropin.ptable import PTable
from onnxtrain.dropin.structures import (
    ORTModelInputOutputSchemaType,
    ORTModelInputOutputType,
    PrimitiveType,
    extract_data_and_schema,
    unflatten_data_using_schema,
)
from onnxtrain.observe.memory import log_memory_usage
from onnxtrain.observe.nvtx import nvtx_function_decorator, torch_nvtx_range_pop, torch_nvtx_range_push

__all__ = [
    "ORTModelInputOutputSchemaType",
    "ORTModelInputOutputType",
    "PTable",
    "PrimitiveType",
    "extract_data_and_schema",
    "log_memory_usage",
    "nvtx_function_decorator",
    "onnx_dtype_to_pytorch_dtype",
    "pytorch_scalar_type_to_pytorch_dtype",
    "pytorch_type_to_onnx_dtype",
    "torch_nvtx_range_pop",
    "torch_nvtx_range_push",
    "unflatten_data_using_schema",
]
