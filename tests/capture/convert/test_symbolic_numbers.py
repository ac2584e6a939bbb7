"""Operators that get the size of an input as a Python number."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_matches

CALLS: dict[str, tuple[int, Callable[[torch.Tensor, Any], torch.Tensor]]] = {
    # name: captures for two sizes, function of a tensor and its size
    "ignored label": (1, lambda x, n: F.cross_entropy(x, torch.arange(n) % 3, ignore_index=n - 5)),
    "ignored label of log probabilities": (1, lambda x, n: F.nll_loss(x, torch.arange(n) % 3, ignore_index=n - 5)),
    "scalar of an attribute": (2, F.leaky_relu),
    "keyword": (2, lambda x, n: torch.add(x, x, alpha=n)),
    "operator without a definition": (2, lambda x, n: torch.special.zeta(x.abs() + 2, n)),
    "list": (2, lambda x, n: F.conv1d(x.T[None], torch.ones(1, 4, 1, dtype=x.dtype), padding=n)),
}


def called(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)  # type: ignore[no-any-return]


def differentiated(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = module(x)
    return [y, *torch.autograd.grad(y.sum(), x)]


@pytest.mark.parametrize("name", CALLS)
def test_a_size_as_a_number(name: str) -> None:
    captures, function = CALLS[name]

    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x, x.size(0))

    ours = ORTModule(Module(), fallback_policy="FALLBACK_DISABLE")
    for size in (5, 7):
        x = torch.randn(size, 4, requires_grad=True)
        run = differentiated if name != "operator without a definition" else called  # zeta has no gradient for x
        assert_matches(run(ours, x), run, Module(), x)
    assert engine_of(ours).captures == captures
