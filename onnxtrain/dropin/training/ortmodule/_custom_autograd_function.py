"""`onnxruntime.training.ortmodule._custom_autograd_function`."""

from onnxtrain.dropin.legacy import enable_custom_autograd_support

__all__ = ["enable_custom_autograd_support"]
