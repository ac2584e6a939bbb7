"""`onnxruntime.training.ortmodule.experimental.hierarchical_ortmodule`."""

from onnxtrain.hierarchical import HierarchicalORTModule

__all__ = ["HierarchicalORTModule"]
