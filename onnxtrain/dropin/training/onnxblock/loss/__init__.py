"""`onnxruntime.training.onnxblock.loss`."""

from onnxtrain.onnxblock.loss import *  # noqa: F403  all its blocks
