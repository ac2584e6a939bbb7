"""`onnxruntime.training.ortmodule.ortmodule`."""

from onnxtrain import ORTModule

__all__ = ["ORTModule"]
