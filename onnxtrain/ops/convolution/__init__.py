"""Convolutions and transposed convolutions (`conv`); a compiled kernel of the weight gradient (`weight_gradient`)."""

from onnxtrain.ops.convolution.conv import CONV

__all__ = ["CONV"]
