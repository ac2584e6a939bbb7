"""`onnxruntime.training.experimental.gradient_graph`."""

from onnxtrain.device.gradient_graph import export_gradient_graph

__all__ = ["export_gradient_graph"]
