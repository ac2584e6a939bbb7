"""`onnxruntime.training.api.lr_scheduler`."""

from onnxtrain.api import LinearLRScheduler

__all__ = ["LinearLRScheduler"]
