"""Custom functions whose backward returns or changes its own inputs, and functions in evaluation."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.autograd import Function

from onnxtrain import DebugOptions, ORTModule
from onnxtrain.testing import assert_no_worse_than_eager


class Passes(Function):
    """Returns the gradient itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0]


class Viewed(Passes):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].view(-1).view_as(gradients[0])


class Saved(Function):
    """Returns a tensor that forward saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.saved_tensors[0]


class Declared(Passes):
    """Declares what ONNX Runtime Training asks for: the output of backward is its input."""

    @staticmethod
    def alias_input(node_proto_str: str) -> tuple[list[int], list[int]]:
        return [-1], [0]


class Shared(Function):
    """Returns one gradient for two inputs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], gradients[0]


class Model(nn.Module):
    """The gradient that backward returns is used twice: by the layer, and added to another."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        z = self.function.apply(y, torch.tanh(y)) if self.function is Shared else self.function.apply(y)
        result: torch.Tensor = z.sin() + y
        return result


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()]))


@pytest.mark.parametrize("function", [Passes, Viewed, Saved, Declared, Shared])
def test_aliases_of_gradients_are_not_overwritten(function: Any) -> None:
    module = Model(function)
    wrapped = ORTModule(copy.deepcopy(module), fallback_policy="FALLBACK_DISABLE")
    exact = copy.deepcopy(module).double()
    for rows in (3, 3, 5):
        x = torch.randn(rows, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            grads = gradients(wrapped, x)
        triples = zip(grads, gradients(module, x), gradients(exact, x.double()), strict=True)
        for number, (got, eager, right) in enumerate(triples):
            assert_no_worse_than_eager(f"{function.__name__} {number}", got, eager, right)


@pytest.mark.parametrize("entry", ["a pass of training first", "evaluation alone"])
def test_evaluation_is_written_with_training_mode_0(entry: str, tmp_path: Path) -> None:
    options = DebugOptions(save_onnx=True, onnx_prefix="m", save_path=tmp_path)
    module = ORTModule(Model(Passes), options, fallback_policy="FALLBACK_DISABLE")
    x = torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if entry != "evaluation alone":
            module(x).sum().backward()
        module.eval()
        with torch.no_grad():
            module(x)
    for path in tmp_path.iterdir():
        calls = [node for node in onnx.load(path).graph.node if node.op_type == "PythonOp"]
        modes = [a.i for node in calls for a in node.attribute if a.name == "training_mode"]
        assert modes == [1 if path.stem.endswith("training") else 0], path.name
