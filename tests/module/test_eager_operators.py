"""Forward takes the operators of eager PyTorch, not those that it has for other runtimes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.capture.capture import Captured
from onnxtrain.device.from_torch import capture_call
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.testing import assert_no_worse_than_eager

SOLVE = "aten::linalg_solve_triangular"


def is_exporting() -> bool:
    """Ask on behalf of another function, as transformers' `is_torchdynamo_exporting` does."""
    return torch.compiler.is_exporting()


def solve(system: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Solve a unit lower triangular system as transformers' gated delta nets do."""
    if not is_exporting():
        return torch.linalg.solve_triangular(system, values, upper=False, unitriangular=True)
    inverse = -system.tril(-1)
    for i in range(1, system.shape[-1]):
        row, rows = inverse[..., i, :i].clone(), inverse[..., :i, :i].clone()
        inverse[..., i, :i] = row + (row.unsqueeze(-1) * rows).sum(-2)
    return (inverse + torch.eye(system.shape[-1], dtype=system.dtype)) @ values


def solve_if_not_compiled(system: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Solve it by another operator only if neither compiled nor exported."""
    if torch.compiler.is_compiling() and torch.compiler.is_exporting():
        return values - system.tril(-1) @ values
    return torch.linalg.solve_triangular(system, values, upper=False, unitriangular=True)


class Solving(torch.nn.Module):
    def __init__(self, solve: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(4, 1))
        self.values = torch.nn.Parameter(torch.rand(4, 3))
        self.solve = solve

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.solve(self.scale * x, self.values)


def operators(captured: Captured) -> set[str]:
    return {node.attributes.get_string("operator", node.op_type) for node in captured.model.graph}


@pytest.mark.filterwarnings("ignore:.*operators without an ONNX form")
def test_the_loop_of_an_exported_model_is_not_captured() -> None:
    module = Solving(solve)
    wrapped, exact = ORTModule(copy.deepcopy(module)), copy.deepcopy(module).double()
    for rows in (2, 3):
        x = torch.rand(rows, 4, 4)
        results = [wrapped(x), module(x), exact(x.double())]
        cotangent = torch.rand(rows, 4, 3)
        for result in results:
            result.backward(cotangent.to(result.dtype))
        assert_no_worse_than_eager("result", *(result.detach() for result in results))
    for name in ("scale", "values"):
        gradients = [dict(m.named_parameters())[name].grad for m in (wrapped.module, module, exact)]
        assert_no_worse_than_eager(name, *gradients)
    assert SOLVE in operators(engine_of(wrapped).newest().captured)
    assert engine_of(wrapped).captures == 1


def test_a_function_that_asks_for_both_is_exported() -> None:
    wrapped = ORTModule(Solving(solve_if_not_compiled))
    wrapped(torch.rand(2, 4, 4))
    assert SOLVE not in operators(engine_of(wrapped).newest().captured)


def checked(system: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Leave checks of parameters out of an export."""
    if not torch.compiler.is_exporting() and values.max() > 10.0:
        raise ValueError("too large")
    return system @ values


def test_branches_of_eager_pytorch_are_not_captured() -> None:
    wrapped = ORTModule(Solving(checked), fallback_policy="FALLBACK_DISABLE")
    x = torch.rand(2, 4, 4)
    torch.testing.assert_close(wrapped(x), wrapped.module(x))
    assert engine_of(wrapped).captures == 1


def test_artifacts_have_the_operators_of_other_runtimes() -> None:
    captured = capture_call(Solving(solve), [torch.rand(2, 4, 4)], {})  # raises if only PyTorch can run one of them
    assert SOLVE not in operators(captured)
