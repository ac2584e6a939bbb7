"""What is computed when and what is kept: from a joint graph to a forward and a backward part."""

from onnxtrain.plan.cut import Cut, Part, cut

__all__ = ["Cut", "Part", "cut"]
