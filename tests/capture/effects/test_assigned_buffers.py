"""Buffers that forward assigns get their new values as in eager, or the module falls back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import FallbackPolicy, ORTModule
from onnxtrain.errors import ChangedParameterError
from tests.reference import assert_each_no_worse

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Inner(nn.Module):
    """A module with a weight and two buffers, whose forward is the test's."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.register_buffer("a", torch.arange(5.0))
        self.register_buffer("b", -torch.arange(5.0))
        self.register_buffer("nothing", None)
        self.call = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, x * self.weight)


def outer(forward: Forward) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), Inner(forward))


def adds(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = m.a + x.detach().sum(0)
    return x + m.a


def reads_then_adds(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * m.a
    m.a = 0.9 * m.a + 0.1 * x.detach().mean(0)
    return y + m.a


def swaps(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a, m.b = m.b, m.a + 1
    return x * m.a + m.b


def swaps_alone(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a, m.b = m.b, m.a
    return x + m.a


def assigns_twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = m.a + 1
    m.a = m.a * x.detach().sum(0)
    return x + m.a


def assigns_and_writes(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.b.add_(1)
    m.a = m.b * 2
    m.b.mul_(3)
    return x + m.a - m.b


def returns_the_assigned_value(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = x.detach().sum(0)
    return x.sum(0) + m.a


@pytest.mark.parametrize("wrap", [Inner, outer], ids=["module", "submodule"])
@pytest.mark.parametrize(
    "forward",
    [adds, reads_then_adds, swaps, swaps_alone, assigns_twice, assigns_and_writes, returns_the_assigned_value],
    ids=lambda f: f.__name__,
)
def test_results_gradients_and_buffers_match_eager(forward: Forward, wrap: Callable[[Forward], nn.Module]) -> None:
    torch.manual_seed(0)
    eager = wrap(forward)
    ours, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    module = ORTModule(ours, fallback_policy=FallbackPolicy.FALLBACK_DISABLE)
    for size in (4, 4, 7):
        x = torch.randn(size, 5)
        results = module(x), eager(x), exact(x.double())
        assert_each_no_worse("result", *results)
        for result in results:
            result.sum().backward()
        assert_each_no_worse("buffer", *(dict(m.named_buffers()) for m in (ours, eager, exact)))
    assert_each_no_worse("gradient", *([p.grad for p in m.parameters()] for m in (ours, eager, exact)))


def changes_the_shape(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = torch.cat([m.a, m.a[:1]])
    return x + m.a[:5]


def assigns_a_dynamic_shape(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = x.detach()[:, 0]
    return x


def changes_the_dtype(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = m.a.double()
    return x + m.a.float()


def adds_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.nothing = x.detach().sum(0)
    return x + m.nothing


def removes_a_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = None
    return x


def assigns_a_value_with_a_gradient(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = x.sum(0)
    return x + m.a


REFUSED = [
    changes_the_shape,
    assigns_a_dynamic_shape,
    changes_the_dtype,
    adds_a_buffer,
    removes_a_buffer,
    assigns_a_value_with_a_gradient,
]


@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
def test_an_assignment_of_another_kind_of_tensor_is_refused(forward: Forward) -> None:
    module = ORTModule(outer(forward), fallback_policy=FallbackPolicy.FALLBACK_DISABLE)
    with pytest.raises(ChangedParameterError, match=r"1\.(a|nothing)"):
        module(torch.randn(4, 5))


@pytest.mark.parametrize("forward", [changes_the_shape, adds_a_buffer], ids=lambda f: f.__name__)
def test_the_module_falls_back_after_such_an_assignment(forward: Forward) -> None:
    torch.manual_seed(0)
    eager = outer(forward)
    ours = copy.deepcopy(eager)
    module = ORTModule(ours)
    with pytest.warns(UserWarning, match="PyTorch"):
        module(torch.ones(4, 5))
    eager(torch.ones(4, 5))
    x = torch.randn(3, 5)
    assert torch.equal(module(x), eager(x))
    assert all(map(torch.equal, ours.buffers(), eager.buffers()))


def returns_the_tensor(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = m.a * 0.9
    return m.a


def returns_a_view_of_the_tensor(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = m.a * 0.9
    return m.a[1:]


@pytest.mark.parametrize("wrap", [Inner, outer], ids=["module", "submodule"])
@pytest.mark.parametrize("forward", [returns_the_tensor, returns_a_view_of_the_tensor], ids=lambda f: f.__name__)
def test_writes_to_a_result_that_is_an_assigned_buffer_change_the_buffer(
    forward: Forward, wrap: Callable[[Forward], nn.Module]
) -> None:
    """In eager, both are one tensor until the next call assigns another."""
    eager = wrap(forward)
    ours = copy.deepcopy(eager)
    module = ORTModule(ours)
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    with pytest.warns(UserWarning, match="the result and the buffer share memory"):
        module(torch.ones(3, 5))
    eager(torch.ones(3, 5))
    for _ in range(3):
        results.append((module(torch.ones(3, 5)).mul_(2), eager(torch.ones(3, 5)).mul_(2)))
        for (name, actual), (_, expected) in zip(ours.named_buffers(), eager.named_buffers(), strict=True):
            assert torch.equal(actual, expected), name
    assert all(torch.equal(actual, expected) for actual, expected in results)
