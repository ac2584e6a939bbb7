"""The version of PyTorch that runs the tests, and how older ones differ. The oldest supported one is 2.11."""

import pytest
import torch

from onnxtrain.frontend.ort_module import engine_of

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def max_captures(module: torch.nn.Module) -> int:
    """Return how often an ORTModule may capture a module for which one capture should suffice.

    PyTorch before 2.13 makes conditions of what it checks of a pooling's sizes: it is captured again where one of two
    axes that was even is odd. Its multi-head attention calls `contiguous()` before it joins the heads (2.13 calls
    `reshape()`), which copies nothing at one token: that is another graph, and another one in a batch of one.
    """
    if TORCH >= (2, 13):
        return 1
    graph = engine_of(module)._newest.captured.model.graph
    if any(node.op_type in ("MaxPool", "AveragePool") for node in graph):
        return 4
    return 3 if any(isinstance(part, torch.nn.MultiheadAttention) for part in module.modules()) else 1


def needs_torch(major: int, minor: int, why: str) -> pytest.MarkDecorator:
    """Skip tests of features that differ in older versions of PyTorch."""
    return pytest.mark.skipif((major, minor) > TORCH, reason=f"torch {torch.__version__} {why}")
