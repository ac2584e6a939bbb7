"""Reverse-mode differentiation of a graph, by the gradient rules of the ops' definitions."""

from onnxtrain.autodiff.differentiate import Joint, differentiate

__all__ = ["Joint", "differentiate"]
