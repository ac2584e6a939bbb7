"""Plan a step: split a joint graph into forward and backward, and decide what backward keeps or recomputes."""

from onnxtrain.plan.cut import Cut, Part, cut

__all__ = ["Cut", "Part", "cut"]
