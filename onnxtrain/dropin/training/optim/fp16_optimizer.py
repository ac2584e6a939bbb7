"""`onnxruntime.training.optim.fp16_optimizer`."""

from onnxtrain.optim import FP16_Optimizer

__all__ = ["FP16_Optimizer"]
