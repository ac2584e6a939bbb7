"""Results are written over inputs only where nobody can see it."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]


class Model(nn.Module):
    def __init__(self, call: Forward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.call(x, self.weight)


def reads_both(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return y.relu() + y


def reads_a_view_later(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    turned = y.t()
    return y.relu() @ turned


def writes_over_a_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return y.t().relu() @ y


def of_an_expanded_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sum(0, keepdim=True).expand(3, 5).relu()


def of_an_argument(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.relu() + w.exp()[0]


def given_out(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x @ w
    return y, y.relu()


def with_itself(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    return y * y.t() if y.shape[0] == y.shape[1] else y * y


def of_another_shape(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).sum(0) + x


def of_another_type(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).float() * x


SEEN = {f.__name__: f for f in (
    reads_both, reads_a_view_later, writes_over_a_view, of_an_expanded_view, of_an_argument, given_out, with_itself,
    of_another_shape, of_another_type,
)}  # fmt: skip


def sources(module: ORTModule) -> str:
    unit = module.__dict__["_engine"].newest().unit
    return "\n".join([unit.forward.source, *(b.program.source for b in unit._backwards.values())])


@pytest.mark.parametrize("name", SEEN)
def test_what_is_read_elsewhere_stays(name: str) -> None:
    model = Model(SEEN[name])
    ours = ORTModule(model)
    for rows in (3, 5):
        x = torch.randn(rows, 5, dtype=torch.float64)
        results = []
        for module in (model, ours):
            mine = x.clone().requires_grad_()
            model.zero_grad()
            found = module(mine)
            outputs = found if isinstance(found, tuple) else (found,)
            sum((o * o.detach().cos()).sum() for o in outputs).backward()
            results.append([*outputs, mine, mine.grad, model.weight.grad])
        for eager, own in zip(*results, strict=True):
            torch.testing.assert_close(own, eager)


def test_what_nobody_reads_is_written_over() -> None:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w).relu() @ w + 1).sigmoid() * 2

    model = Model(call)
    ours = ORTModule(model)
    x = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(ours(x), model(x))
    assert ".relu_()" in sources(ours)
    assert ".add_(" in sources(ours)


def test_a_users_function_may_keep_what_it_gives() -> None:
    kept: list[torch.Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            kept.append(y)
            return y

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    ours = ORTModule(Model(lambda x, w: Keeps.apply(x @ w).relu()))  # type: ignore[no-untyped-call]
    x = torch.randn(3, 5, dtype=torch.float64)
    ours(x)
    torch.testing.assert_close(kept[-1], 2 * x @ ours.weight)
