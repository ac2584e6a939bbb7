"""Several backwards of one forward, for results that share no saved tensors, as in eager."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.execute.independent_backwards import IndependentBoundary
from onnxtrain.frontend.hierarchical_module import HierarchicalORTModule
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_matches


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)
        self.norm, self.dropout = nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x + self.bias  # saves nothing
        return self.first(x), self.norm(self.dropout(self.second(x).relu())), x.detach() * 2


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x).relu()
        return self.first(hidden), self.second(hidden)


def in_two(a: torch.Tensor, b: torch.Tensor) -> None:
    a.square().sum().backward()
    b.square().sum().backward()


def the_other_way(a: torch.Tensor, b: torch.Tensor) -> None:
    b.square().sum().backward()
    a.square().sum().backward()


def at_once(a: torch.Tensor, b: torch.Tensor) -> None:
    (a.square().sum() + b.square().sum()).backward()


def one_of_them(a: torch.Tensor, b: torch.Tensor) -> None:
    b.square().sum().backward()


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def gradients(module: nn.Module, backward: Callable[..., None], x: torch.Tensor) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    backward(*module(x)[:2])
    tensors = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return tensors


def test_towers() -> None:
    eager = Towers()
    ours = ORTModule(copy.deepcopy(eager), rng="torch", fallback_policy="FALLBACK_DISABLE")
    for backward in (in_two, the_other_way, at_once, one_of_them, in_two):
        assert_matches(gradients(ours, backward, X), gradients, eager, backward, X)
    assert isinstance(engine_of(ours).newest().unit.autograd_apply, IndependentBoundary)


def test_groups_of_several_results() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers, self.head = Towers(), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b, _ = self.towers(x)
            return (self.head(a), b) if a.sum() > 100 else (a, self.head(b))

    eager = Branches()
    eager.towers.dropout.p = 0.0
    ours = HierarchicalORTModule(copy.deepcopy(eager))
    assert_matches(gradients(ours, in_two, X), gradients, eager, in_two, X)


def test_gradients_of_gradients() -> None:
    eager = Towers().eval()
    ours = ORTModule(copy.deepcopy(eager))

    def twice(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
        a, b, _ = module(x)
        (gradient,) = torch.autograd.grad(b.square().sum(), x, create_graph=True)
        (gradient.square().sum() + a.sum()).backward()
        return [p.grad for p in module.parameters()]

    x = torch.ones(5, 4, requires_grad=True)
    assert_matches(twice(ours, x), twice, eager, x)


@pytest.mark.parametrize("wrap", [copy.deepcopy, ORTModule])
def test_results_that_share_saved_tensors_have_one_backward(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(wrap(Trunk()), in_two, X)


def test_a_result_whose_gradient_is_zero_needs_one() -> None:
    """In eager it requires a gradient, which is zeros."""

    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.round(x), x * self.scale

    module = Rounds()
    x = torch.randn(3, 4, requires_grad=True)
    rounded, scaled = ORTModule(module)(x)
    assert rounded.requires_grad
    assert scaled.requires_grad
    rounded.sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, 4))
    assert module.scale.grad is None


class OneAndTwo(nn.Module):
    """One independent result, and two of one group, of which only the first depends on the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = x.tanh() * 2
        return F.glu(x, -1), F.dropout(y, 0.3) * self.weight, (y * 2).erf()


def test_an_input_that_no_cotangent_reaches_has_no_gradient() -> None:
    """With zeros, weight decay and momentum would change a parameter that stays the same in eager."""
    model = ORTModule(OneAndTwo(), rng="torch")
    for _ in range(3):
        model.zero_grad()
        x = torch.randn(4, requires_grad=True)
        model(x)[2].sum().backward()
        assert model.weight.grad is None
        assert_matches(x.grad, lambda x: torch.autograd.grad((x.tanh() * 4).erf().sum(), x)[0], x)
    model(x)[1].sum().backward()
    assert model.weight.grad is not None
