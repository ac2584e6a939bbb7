"""Convolutions and their transposes (`conv`), and the compiled kernel of a weight's gradient (`weight_gradient`)."""

from onnxtrain.ops.convolution.conv import CONV

__all__ = ["CONV"]
