"""A submodule has two names, as T5's embedding has: torch.export then passes other objects than the modules to forward.

The capture recorded the attributes of these objects, so that no change of a module's attribute was noticed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onnxtrain import ORTModule
from tests.reference import assert_matches


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * self.scale
        return y


class WithTwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled()
        self.embedding = nn.Linear(4, 4)
        self.alias = self.embedding
        self.others = nn.ModuleList([Scaled(), Scaled()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.alias(x))
        for module in self.others:
            x = module(x)
        y: Tensor = self.embedding(x)
        return y


def test_attributes_change() -> None:
    model = WithTwoNames()
    ours, x = ORTModule(model, fallback_policy="FALLBACK_DISABLE"), torch.randn(2, 4)
    ours(x)
    for changed in (model.first, model.others[1]):
        changed.scale = 3.0  # type: ignore[assignment]  # a float, not a module
        assert_matches(ours(x), model, x)
