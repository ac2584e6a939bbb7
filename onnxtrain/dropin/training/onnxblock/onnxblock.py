"""`onnxruntime.training.onnxblock.onnxblock`."""

from onnxtrain.onnxblock import ForwardBlock, TrainingBlock

__all__ = ["ForwardBlock", "TrainingBlock"]
