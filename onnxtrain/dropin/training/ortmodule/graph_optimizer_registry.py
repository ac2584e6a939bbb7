"""`onnxruntime.training.ortmodule.graph_optimizer_registry`."""

from onnxtrain.passes.user_functions import register_graph_optimizer

__all__ = ["register_graph_optimizer"]
