"""`onnxruntime.training.ortmodule.graph_optimizers.utils`."""

from onnxtrain.dropin.graph_matcher import GraphMatcher, check_attribute_value, make_constant_node, update_graph

__all__ = ["GraphMatcher", "check_attribute_value", "make_constant_node", "update_graph"]
