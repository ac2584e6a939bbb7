"""`onnxruntime.training.api.module`."""

from onnxtrain.api import Module

__all__ = ["Module"]
