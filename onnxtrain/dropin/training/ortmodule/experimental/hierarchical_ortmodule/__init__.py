"""`onnxruntime.training.ortmodule.experimental.hierarchical_ortmodule`."""

from onnxtrain.frontend.hierarchical_module import HierarchicalORTModule

__all__ = ["HierarchicalORTModule"]
