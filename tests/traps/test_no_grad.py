"""Silent errors of code that runs without gradient: each test fails when its guard is removed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.thinned import slow_except
from tests.zoo.checks import compared
from tests.zoo.entry import Call, Draw, ZooModel, mean_square

WIDTH = 6


def features(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, WIDTH, grad=True),))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change_after(self.first(x))

    def change_after(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def _check(change_after: Callable[[Net, torch.Tensor], torch.Tensor], falls_back: str | None = None) -> None:
    module_class = type("Net", (Net,), {"change_after": change_after})
    with compared(ZooModel("net", module_class, features, mean_square, falls_back=falls_back)) as compare:
        compare.train(3, 0)
        compare.train(1, 0)


# Nested switches of grad mode and of autocast


def _no_grad_in_autocast(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            quiet = net.last(hidden).float()
        return hidden * quiet


def _autocast_in_no_grad_and_no_grad_in_that(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        quiet = net.last(hidden)
        with torch.no_grad():
            quiet = quiet.float() * net.last.bias
    return hidden * quiet


# Mutations that autograd does not see, of tensors without gradient


def _written_rows(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    table = torch.zeros_like(hidden)
    with torch.no_grad():
        table[:, 1] = hidden[:, 1] * 2
    return table * net.last.bias + hidden


def _several_at_once(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    sums = [torch.zeros_like(hidden), torch.ones_like(hidden)]
    with torch.no_grad():
        torch._foreach_add_(sums, [hidden, hidden * 2])
    return sums[0] * hidden + sums[1]


def _buffer(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        net.average.lerp_(hidden.mean(0), 0.25)
    return hidden - net.average


def _result_of_a_region(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        quiet = hidden * 2
    quiet.mul_(hidden)
    return quiet + hidden


def _view_out_of_a_region(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    table = torch.zeros_like(hidden)
    with torch.no_grad():
        left, right = hidden.chunk(2, -1)
        corner = table[:, :2]
    with torch.no_grad():
        corner.add_(1)
    return hidden[:, :3] * left - right + table[:, 1:4]


def _detached_attention(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    probabilities = torch.softmax(net.last(hidden) @ hidden.mT, -1)
    return probabilities.detach() @ hidden


def _detached_norm(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    hidden = net.last(hidden)
    normal = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
    return net.last.bias * normal.detach()


def _probabilities(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    weights = hidden.detach().softmax(-1)
    weights[weights < 0.2] = 0
    weights /= weights.sum(-1, keepdim=True)
    return hidden * weights


CAPTURED = [
    *(_no_grad_in_autocast, _autocast_in_no_grad_and_no_grad_in_that, _written_rows, _several_at_once, _buffer),
    *(_result_of_a_region, _view_out_of_a_region, _detached_attention, _detached_norm, _probabilities),
]


@pytest.mark.parametrize("change_after", CAPTURED, ids=lambda f: f.__name__.strip("_"))
def test_inputs_without_a_gradient_get_none(change_after: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
    _check(change_after)


# Operators that return their argument itself: it has its gradient in eager, also if they are called under no_grad

SAME_OBJECT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to its dtype": lambda x: x.to(x.dtype),
    "to its device and dtype": lambda x: x.to("cpu", x.dtype),
    "type_as": lambda x: x.type_as(x),
    "contiguous": torch.Tensor.contiguous,
    "flatten of one axis": lambda x: x.flatten(1, 1),
    "real": torch.real,
    "positive": torch.positive,
    "dropout in evaluation": lambda x: torch.dropout(x, 0.5, False),
    "at least 2d": torch.atleast_2d,
    "twice": lambda x: x.to(x.dtype).contiguous(),
}
NEW_OBJECT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(x.shape),
    "expand": lambda x: x.expand(x.shape),
    "of a view": lambda x: x[:].contiguous(),
    "detach": torch.Tensor.detach,
}


# Others are as one of these: of a dtype, without any effect, or a view.
FEW_OBJECTS = (
    *("to its dtype", "contiguous", "flatten of one axis", "dropout in evaluation", "at least 2d"),
    *("expand", "of a view", "detach"),
)


@pytest.mark.parametrize("function", slow_except([*SAME_OBJECT, *NEW_OBJECT], *FEW_OBJECTS))
@pytest.mark.parametrize("reads", slow_except(["result", "argument", "both"], "argument"))
def test_an_argument_that_an_operator_returns_under_no_grad_keeps_its_gradient(function: str, reads: str) -> None:
    """Also if forward then reads the argument: a trace does not distinguish it from the result."""
    call = (SAME_OBJECT | NEW_OBJECT)[function]

    def change_after(net: Net, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            result = call(hidden)
            chosen = net.last(result).argmax(-1, keepdim=True)
        assert (result is hidden) == (function in SAME_OBJECT)
        values = {"result": result, "argument": hidden, "both": result * hidden}[reads]
        return (values * net.last.bias).gather(-1, chosen)

    _check(change_after)


# Mutations that autograd does not see, of tensors with a gradient, which eager keeps


def _doubled(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden.mul_(2)
    return hidden * net.average.add(1)


def _zeroed_columns(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden[:, :2].zero_()
    return hidden * net.average.add(1)


def _through_detach(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    hidden.detach().clamp_(min=0)
    return hidden * net.average.add(1)


def _through_integers(net: Net, hidden: torch.Tensor) -> torch.Tensor:
    bits = torch.int32 if hidden.dtype == torch.float32 else torch.int64
    seen = hidden.view(bits).view(hidden.dtype)
    seen.zero_()
    return hidden * net.average.add(1) + seen


@pytest.mark.parametrize(
    "change_after",
    slow_except(
        [_doubled, _zeroed_columns, _through_detach, _through_integers], _doubled, _through_detach, _through_integers
    ),
    ids=lambda f: f.__name__.strip("_"),
)
def test_a_value_changed_where_autograd_does_not_look_keeps_its_gradient(
    change_after: Callable[[Net, torch.Tensor], torch.Tensor],
) -> None:
    _check(change_after, falls_back="where autograd does not see it")


def test_gradients_switched_on_under_no_grad() -> None:
    """Values that forward computes under enable_grad need a gradient, even if the caller disabled gradients."""

    def change_after(net: Net, hidden: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return net.last(hidden)

    module_class = type("Net", (Net,), {"change_after": change_after})
    entry = ZooModel("net", module_class, features, mean_square, falls_back="enable_grad")
    with compared(entry) as compare, torch.no_grad():
        assert compare.eager.call(3, 0)[1].requires_grad
        assert compare.got.call(3, 0)[1].requires_grad
