"""`onnxruntime.training.optim.config`."""

from onnxtrain.optim import AdamConfig, LambConfig, SGDConfig

__all__ = ["AdamConfig", "LambConfig", "SGDConfig"]
