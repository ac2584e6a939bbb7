"""`onnxruntime.training.onnxblock.blocks`."""

from onnxtrain.onnxblock.blocks import *  # noqa: F403  all its blocks
