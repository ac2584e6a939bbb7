"""`onnxruntime.training.utils.torch_io_helper`."""

from onnxtrain.dropin.structures import (
    ORTModelInputOutputSchemaType,
    ORTModelInputOutputType,
    PrimitiveType,
    extract_data_and_schema,
    unflatten_data_using_schema,
)

__all__ = [
    "ORTModelInputOutputSchemaType",
    "ORTModelInputOutputType",
    "PrimitiveType",
    "extract_data_and_schema",
    "unflatten_data_using_schema",
]
