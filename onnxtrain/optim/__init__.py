"""Optimizers, learning rate schedules and loss scalers."""

from onnxtrain.optim.config import AdamConfig, LambConfig, SGDConfig
from onnxtrain.optim.fp16 import FP16_Optimizer
from onnxtrain.optim.fused_adam import AdamWMode, FusedAdam
from onnxtrain.optim.loss_scaler import DynamicLossScaler, LossScaler
from onnxtrain.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
)
from onnxtrain.optim.step_info import TrainStepInfo

__all__ = [
    "AdamConfig",
    "AdamWMode",
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "DynamicLossScaler",
    "FP16_Optimizer",
    "FusedAdam",
    "LambConfig",
    "LinearWarmupLRScheduler",
    "LossScaler",
    "PolyWarmupLRScheduler",
    "SGDConfig",
    "TrainStepInfo",
]
