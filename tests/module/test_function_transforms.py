"""`torch.vmap` and `torch.func` in forward: captured if PyTorch exports them, else run in PyTorch."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._C import _functorch

from onnxtrain import ORTModule
from tests.reference import assert_matches
from tests.thinned import slow_but_every
from tests.torch_version import needs_torch

Call = Callable[[nn.Linear, torch.Tensor], torch.Tensor]


class Calls(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.linear, x)


def each(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(lambda row: linear(row).tanh().sum())(x)


def directional(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    change: torch.Tensor = torch.func.jvp(lambda v: linear(v).sin(), (x,), (x * 2,))[1]
    return change


def gradient(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda v: linear(v).tanh().sum())(x)


def each_gradient(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.func.grad(lambda row: linear(row).tanh().sum()))(x)


def step(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaf = x.clone().requires_grad_()
    result = module(leaf)
    module.zero_grad()
    (result * torch.linspace(0.5, 1.5, result.numel()).view_as(result)).sum().backward()
    gradients: list[Any] = [leaf.grad, *(p.grad for p in module.parameters())]
    return tuple(g for g in (result, *gradients) if g is not None)


@pytest.mark.parametrize("call", slow_but_every(2, [each, directional, gradient, each_gradient]))
def test_equals_eager(call: Call) -> None:
    eager = Calls(call)
    ours = ORTModule(copy.deepcopy(eager))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the fallback warning
        for count in (4, 3, 1):
            x = torch.randn(count, 6)
            results = step(ours, x)
            assert not any(_functorch.is_functorch_wrapped_tensor(t) for t in results)
            assert_matches(results, step, eager, x)
    assert _functorch.get_dynamic_layer_stack_depth() == 0


_EXPORTED = needs_torch(2, 13, "cannot export it: its tensors without elements become constants")


@pytest.mark.parametrize("call", [each, pytest.param(directional, marks=_EXPORTED)])
def test_transforms_that_pytorch_exports_are_captured(call: Call) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "error", message=".*runs in PyTorch"
        )  # PyTorch may warn of other things when it imports modules
        ORTModule(Calls(call))(torch.randn(4, 6))
