"""`onnxruntime.training.optim`."""

from onnxruntime.training.optim import config, lr_scheduler

from onnxtrain.optim import AdamConfig, AdamWMode, FP16_Optimizer, FusedAdam, LambConfig, SGDConfig

__all__ = [
    "AdamConfig",
    "AdamWMode",
    "FP16_Optimizer",
    "FusedAdam",
    "LambConfig",
    "SGDConfig",
    "config",
    "lr_scheduler",
]
