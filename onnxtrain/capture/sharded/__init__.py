"""Capture modules whose parameters are DTensors, as `parallelize_module` makes them."""

from onnxtrain.capture.sharded import rules  # what PyTorch's functions do with such values

__all__ = ["rules"]
