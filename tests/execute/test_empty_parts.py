"""Modules whose forward computes nothing, so that the forward or backward program has no nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule

FORWARDS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "an argument": lambda m, x: x,
    "a parameter": lambda m, x: m.weight,
    "both": lambda m, x: (m.weight, x),
    "views": lambda m, x: (x.view(-1), m.weight.expand(2, 3)),
    "a constant beside a parameter": lambda m, x: (torch.ones(2), m.weight),
}


class Returns(nn.Module):
    def __init__(self, forward: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))
        self.returned = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.returned(self, x)


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_without_nodes(name: str) -> None:
    module = Returns(FORWARDS[name])
    wrapped = ORTModule(module, fallback_policy="FALLBACK_DISABLE")
    for _ in range(2):
        results = []
        for run in (wrapped, module):
            x = torch.arange(6.0).reshape(2, 3).requires_grad_()
            outputs = run(x)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            differentiable = [t for t in outputs if t.requires_grad]
            torch.autograd.backward(differentiable, [torch.full_like(t, 3.0) for t in differentiable])
            results.append([*outputs, x.grad, module.weight.grad])
            module.weight.grad = None
        for got, expected in zip(*results, strict=True):
            assert (got is None) == (expected is None)
            assert got is None or (torch.equal(got, expected) and got.requires_grad == expected.requires_grad)
