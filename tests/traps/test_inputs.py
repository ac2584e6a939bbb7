"""Silent errors in the inputs and requests of a capture: each test fails when its guard is removed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.testing import assert_no_worse_than_eager
from tests.reference import assert_matches
from tests.zoo.checks import compared
from tests.zoo.entry import Call, Draw, ZooModel, mean_square

WIDTH = 6


def features(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, WIDTH, grad=True),))


class Hidden(nn.Module):
    """Return an output `relu` while another value is `relu_1`: their gradients need distinct names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.relu(self.linear(x))
        return torch.relu(self.linear(first + 1)) * 2, first


def test_an_output_that_is_named_like_another_value() -> None:
    entry = ZooModel("hidden", Hidden, features, lambda o: mean_square(o[0]) + mean_square(o[1]))
    with compared(entry) as compare:
        compare.train(3, 0)


def test_an_input_that_has_a_gradient_before_the_capture() -> None:
    """torch.export makes the sizes of that gradient symbolic too."""
    module = nn.Linear(WIDTH, 2)
    ours = ORTModule(module)
    x = torch.randn(4, WIDTH, requires_grad=True)
    x.grad = torch.ones_like(x)
    for _ in range(3):
        assert_matches(ours(x), module, x)
    ours(x).sum().backward()
    assert_matches(x.grad, lambda weight: (1 + weight.sum(0)).expand(4, WIDTH), module.weight)
    assert ours(torch.randn(5, WIDTH, requires_grad=True)).shape == (5, 2)


class ReadsElements(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("step", torch.tensor([3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        scale = hidden.mean().item()  # it has no gradient
        self.step += 1
        return hidden * scale + self.step.item() / 2 - scale * self.step.item()  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_element_that_is_read_as_a_number(dtype: torch.dtype) -> None:
    with compared(ZooModel("reads", ReadsElements, features, mean_square), dtype) as compare:
        for batch in (3, 1, 5):
            compare.train(batch, 0)


def test_a_number_that_is_read_is_rounded_as_eager_rounds_it() -> None:
    """A Python number is a double: multiplying by 1/3 in float64 and in float32 differs in later sums."""

    class Reads(nn.Module):
        def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
            return x + number.item() * 3 - number.item()

    x, number = torch.randn(100), torch.tensor(1 / 3, dtype=torch.float64)
    module = Reads()
    got, eager = ORTModule(module)(x, number), module(x, number)
    assert got.dtype == eager.dtype
    assert_no_worse_than_eager("result", got, eager, module(x.double(), number))


def test_a_number_that_wraps_in_a_small_integer_type() -> None:
    """PyTorch wraps 200 to -56 with int8; numpy raises."""

    class Small(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps = torch.arange(WIDTH, dtype=torch.int8)
            return x * (steps + 200) + (torch.arange(WIDTH, dtype=torch.uint8) - 3)

    with compared(ZooModel("small", Small, features, mean_square)) as compare:
        compare.train(3, 0)


@pytest.mark.parametrize("usual", [False, True])
def test_negated_views_are_read_negated(usual: bool) -> None:
    """Kernels that read memory by its address would see the opposite sign."""
    torch.manual_seed(0)
    module = nn.RMSNorm(64)
    wrapped = ORTModule(module)
    x = torch.randn(64, 64)
    for _ in range(3 if usual else 0):  # the call takes the fast path
        wrapped(x)
    view = torch.complex(x, x).conj().imag
    assert view.is_neg()
    with pytest.warns(UserWarning, match="negated"):
        y = wrapped(view)
    assert_matches(y, module, -x)
