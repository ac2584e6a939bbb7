"""`onnxruntime.training.ortmodule.graph_optimizer_registry`."""

from onnxtrain.passes.user_graph_optimizers import register_graph_optimizer

__all__ = ["register_graph_optimizer"]
