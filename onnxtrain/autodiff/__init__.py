"""Reverse-mode automatic differentiation of a graph by the gradient rules of its ops."""

from onnxtrain.autodiff.differentiate import Joint, differentiate

__all__ = ["Joint", "differentiate"]
