"""Optimizers and the clipping of gradients."""

from onnxtrain.device.optimizers import SGD, AdamW, ClipGradNorm

__all__ = ["SGD", "AdamW", "ClipGradNorm"]
