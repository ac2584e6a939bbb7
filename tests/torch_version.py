"""The PyTorch that the tests run on, and what older ones do otherwise. The oldest that is supported is 2.11."""

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def most_captures(module: torch.nn.Module) -> int:
    """How often an ORTModule may have captured a module that one capture should serve.

    Older PyTorch makes conditions of what it checks of a pooling's sizes: it is captured again where one of two axes
    that was even is odd.
    """
    graph = module.__dict__["_engine"]._newest.captured.model.graph
    pools = any(node.op_type in ("MaxPool", "AveragePool") for node in graph)
    return 4 if pools and TORCH < (2, 13) else 1


def needs_torch(major: int, minor: int, why: str) -> pytest.MarkDecorator:
    """For what is not the same in older PyTorch."""
    return pytest.mark.skipif((major, minor) > TORCH, reason=f"torch {torch.__version__} {why}")
