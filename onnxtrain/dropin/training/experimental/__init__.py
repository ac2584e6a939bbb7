"""`onnxruntime.training.experimental`."""

from onnxtrain.device.gradient_graph import export_gradient_graph

__all__ = ["export_gradient_graph"]
