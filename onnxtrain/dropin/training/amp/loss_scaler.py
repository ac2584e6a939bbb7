"""`onnxruntime.training.amp.loss_scaler`."""

from onnxtrain.optim import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "LossScaler"]
