"""`onnxruntime.training.ortmodule.options`."""

from onnxtrain import DebugOptions, LogLevel
from onnxtrain.options import SkipCheck as _SkipCheck

__all__ = ["DebugOptions", "LogLevel", "_SkipCheck"]
