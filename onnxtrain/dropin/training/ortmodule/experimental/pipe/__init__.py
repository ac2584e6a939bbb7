"""`onnxruntime.training.ortmodule.experimental.pipe`."""

from onnxtrain.distributed.pipeline import ORTPipelineModule

__all__ = ["ORTPipelineModule"]
