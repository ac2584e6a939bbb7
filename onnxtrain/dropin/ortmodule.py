"""`onnxruntime.training.ortmodule`, by onnxtrain.

Importing it patches no seed functions: onnxtrain samples from PyTorch's own generators.
"""

import sys

from onnxruntime.capi import build_and_package_info
from onnxruntime.training.ortmodule._fallback import _FallbackPolicy

from onnxtrain import DebugOptions, LogLevel, ORTModule
from onnxtrain.dropin.legacy import (
    MINIMUM_RUNTIME_PYTORCH_VERSION_STR,
    ONNX_OPSET_VERSION,
    ORTMODULE_FALLBACK_POLICY,
    ORTMODULE_FALLBACK_RETRY,
    ORTMODULE_IS_DETERMINISTIC,
    ORTMODULE_TORCH_CPP_DIR,
    Settings,
    is_installed,
    is_ortmodule_available,
    set_seed,
)
from onnxtrain.errors import ORTModuleFallbackException, ORTModuleInitException
from onnxtrain.passes.user_graph_optimizers import register_graph_optimizer

__all__ = [
    "MINIMUM_RUNTIME_PYTORCH_VERSION_STR",
    "ONNXRUNTIME_CUDA_VERSION",
    "ONNXRUNTIME_ROCM_VERSION",
    "ONNX_OPSET_VERSION",
    "ORTMODULE_FALLBACK_POLICY",
    "ORTMODULE_FALLBACK_RETRY",
    "ORTMODULE_IS_DETERMINISTIC",
    "ORTMODULE_ONNX_OPSET_VERSION",
    "ORTMODULE_TORCH_CPP_DIR",
    "DebugOptions",
    "LogLevel",
    "ORTModule",
    "ORTModuleFallbackException",
    "ORTModuleInitException",
    "_FallbackPolicy",
    "is_ortmodule_available",
    "is_torch_cpp_extensions_installed",
    "register_graph_optimizer",
    "set_seed",
]

ORTMODULE_ONNX_OPSET_VERSION = ONNX_OPSET_VERSION
ONNXRUNTIME_CUDA_VERSION: str | None = getattr(build_and_package_info, "cuda_version", None)
ONNXRUNTIME_ROCM_VERSION: str | None = getattr(build_and_package_info, "rocm_version", None)
is_torch_cpp_extensions_installed = is_installed
sys.modules[__name__].__class__ = Settings  # assigning to a setting takes effect
