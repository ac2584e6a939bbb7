"""`onnxruntime.training.optim.fused_adam`."""

from onnxtrain.optim import AdamWMode, FusedAdam

__all__ = ["AdamWMode", "FusedAdam"]
