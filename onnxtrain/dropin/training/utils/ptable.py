"""`onnxruntime.training.utils.ptable`."""

from onnxtrain.dropin.ptable import PTable

__all__ = ["PTable"]
