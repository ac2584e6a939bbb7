"""`onnxruntime.training.onnxblock.optim.optim`."""

from onnxtrain.onnxblock.optim import SGD, AdamW, ClipGradNorm

__all__ = ["SGD", "AdamW", "ClipGradNorm"]
