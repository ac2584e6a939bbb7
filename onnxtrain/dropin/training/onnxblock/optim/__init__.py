"""`onnxruntime.training.onnxblock.optim`."""

from onnxtrain.onnxblock.optim import *  # noqa: F403  all its blocks
