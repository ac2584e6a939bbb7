"""`onnxruntime.training.ortmodule._fallback`."""

from onnxtrain.errors import (
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)
from onnxtrain.options import FallbackPolicy as _FallbackPolicy

__all__ = [
    "ORTModuleDeviceException",
    "ORTModuleFallbackException",
    "ORTModuleIOError",
    "ORTModuleInitException",
    "ORTModuleONNXModelException",
    "ORTModuleTorchModelException",
    "_FallbackPolicy",
]
