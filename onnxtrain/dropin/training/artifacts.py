"""`onnxruntime.training.artifacts`."""

from onnxtrain.artifacts import LossType, OptimType, generate_artifacts

__all__ = ["LossType", "OptimType", "generate_artifacts"]
