"""`onnxruntime.training.ortmodule._fallback_exceptions`."""

from onnxtrain.errors import (
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)

__all__ = [
    "ORTModuleDeviceException",
    "ORTModuleFallbackException",
    "ORTModuleIOError",
    "ORTModuleInitException",
    "ORTModuleONNXModelException",
    "ORTModuleTorchModelException",
]
