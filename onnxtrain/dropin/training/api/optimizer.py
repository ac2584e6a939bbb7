"""`onnxruntime.training.api.optimizer`."""

from onnxtrain.api import Optimizer

__all__ = ["Optimizer"]
