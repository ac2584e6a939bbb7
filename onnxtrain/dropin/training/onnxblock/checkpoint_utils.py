"""`onnxruntime.training.onnxblock.checkpoint_utils`."""

from onnxtrain.onnxblock import load_checkpoint_to_model, save_checkpoint

__all__ = ["load_checkpoint_to_model", "save_checkpoint"]
