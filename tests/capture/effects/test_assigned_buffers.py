"""Buffers that forward assigns have their new values, as in eager PyTorch, or the module runs in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import FallbackPolicy, ORTModule
from onnxtrain.errors import ChangedParameterError

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Inner(nn.Module):
    """Has two buffers and a weight; forward is that of the test."""

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


def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = m.a + 1
    m.a = m.a * x.detach().sum(0)
    return x + m.a


def beside_writes(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.b.add_(1)
    m.a = m.b * 2
    m.b.mul_(3)
    return x + m.a - m.b


def returns_it(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = x.detach().sum(0)
    return x.sum(0) + m.a


@pytest.mark.parametrize("wrap", [Inner, outer], ids=["itself", "inside"])
@pytest.mark.parametrize(
    "forward",
    [adds, reads_then_adds, swaps, swaps_alone, twice, beside_writes, returns_it],
    ids=lambda f: f.__name__,
)
def test_as_in_eager(forward: Forward, wrap: Callable[[Forward], nn.Module]) -> None:
    torch.manual_seed(0)
    eager = wrap(forward)
    ours = copy.deepcopy(eager)
    module = ORTModule(ours, fallback_policy=FallbackPolicy.FALLBACK_DISABLE)
    for size in (4, 4, 7):
        x = torch.randn(size, 5)
        expected, got = eager(x), module(x)
        torch.testing.assert_close(got, expected)
        expected.sum().backward()
        got.sum().backward()
        for (name, mine), (_, theirs) in zip(ours.named_buffers(), eager.named_buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, msg=name)
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def grows(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = torch.cat([m.a, m.a[:1]])
    return x + m.a[:5]


def takes_the_size_of_x(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = x.detach()[:, 0]
    return x


def widens(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = m.a.double()
    return x + m.a.float()


def comes(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.nothing = x.detach().sum(0)
    return x + m.nothing


def goes(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = None
    return x


def keeps_its_gradient(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = x.sum(0)
    return x + m.a


REFUSED = [grows, takes_the_size_of_x, widens, comes, goes, keeps_its_gradient]


@pytest.mark.parametrize("forward", REFUSED, ids=lambda f: f.__name__)
def test_what_its_memory_cannot_hold_is_refused(forward: Forward) -> None:
    module = ORTModule(outer(forward), fallback_policy=FallbackPolicy.FALLBACK_DISABLE)
    with pytest.raises(ChangedParameterError, match=r"1\.(a|nothing)"):
        module(torch.randn(4, 5))


@pytest.mark.parametrize("forward", [grows, comes], ids=lambda f: f.__name__)
def test_the_module_runs_in_pytorch_then(forward: Forward) -> None:
    torch.manual_seed(0)
    eager = outer(forward)
    ours = copy.deepcopy(eager)
    module = ORTModule(ours)
    with pytest.warns(UserWarning, match="PyTorch"):
        module(torch.ones(4, 5))
    eager(torch.ones(4, 5))
    x = torch.randn(3, 5)
    torch.testing.assert_close(module(x), eager(x))
    for mine, theirs in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


def returns_the_assigned(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = m.a * 0.9
    return m.a


def returns_a_view_of_the_assigned(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.a = m.a * 0.9
    return m.a[1:]


@pytest.mark.parametrize("wrap", [Inner, outer], ids=["itself", "inside"])
@pytest.mark.parametrize("forward", [returns_the_assigned, returns_a_view_of_the_assigned], ids=lambda f: f.__name__)
def test_writes_to_a_result_that_is_an_assigned_buffer_change_the_buffer(
    forward: Forward, wrap: Callable[[Forward], nn.Module]
) -> None:
    """As in eager PyTorch, where both are one tensor until the next call assigns another."""
    eager = wrap(forward)
    ours = copy.deepcopy(eager)
    module = ORTModule(ours)
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    with pytest.warns(UserWarning, match="the result and the buffer share memory"):
        module(torch.ones(3, 5))
    eager(torch.ones(3, 5))
    for _ in range(3):
        results.append((module(torch.ones(3, 5)).mul_(2), eager(torch.ones(3, 5)).mul_(2)))
        for (name, mine), (_, theirs) in zip(ours.named_buffers(), eager.named_buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, msg=name)
    for mine, theirs in results:
        torch.testing.assert_close(mine, theirs)
