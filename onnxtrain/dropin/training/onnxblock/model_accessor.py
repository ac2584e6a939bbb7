"""`onnxruntime.training.onnxblock.model_accessor`."""

from onnxtrain.onnxblock import base, custom_op_library, empty_base

__all__ = ["base", "custom_op_library", "empty_base"]
