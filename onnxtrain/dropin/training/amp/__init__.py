"""`onnxruntime.training.amp`."""

from onnxruntime.training.amp import loss_scaler

from onnxtrain.optim import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler", "loss_scaler"]
