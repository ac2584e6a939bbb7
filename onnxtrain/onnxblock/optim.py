"""Optimizers and gradient clipping."""

from onnxtrain.device.optimizers import SGD, AdamW, ClipGradNorm

__all__ = ["SGD", "AdamW", "ClipGradNorm"]
