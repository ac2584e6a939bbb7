"""The PyTorch that the tests run on, and what older ones do otherwise. The oldest that is supported is 2.11."""

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def right_number(captures: int) -> bool:
    """Whether a module that should be captured once was.

    Older PyTorch makes conditions of what it checks of a pooling's sizes: it is captured again where one of two axes
    that was even is odd.
    """
    return captures == 1 or (TORCH < (2, 13) and 1 < captures <= 4)


def needs_torch(major: int, minor: int, why: str) -> pytest.MarkDecorator:
    """For what is not the same in older PyTorch."""
    return pytest.mark.skipif((major, minor) > TORCH, reason=f"torch {torch.__version__} {why}")
