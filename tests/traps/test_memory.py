"""Tensors that share memory: outputs that are views of inputs, changes in place, gradients that accumulate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onnxtrain import ORTModule
from tests.reference import assert_each_no_worse, float64_by_default
from tests.thinned import covering, slow_except
from tests.zoo.checks import compared, count_captures
from tests.zoo.entry import Call, Draw, ZooModel

WIDTH = 6
Make = Callable[[], nn.Module]


class Function(nn.Module):
    """Call a function of the inputs and of parameters, whose memory the tests inspect."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.linspace(0, 1, WIDTH))
        self.square = nn.Parameter(torch.linspace(1, 2, WIDTH).view(2, 3))
        self.register_buffer("table", torch.linspace(-1, 0, WIDTH))
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def pair(function: Callable[..., Any]) -> tuple[nn.Module, nn.Module]:
    """Return the same module wrapped and in eager."""
    return ORTModule(Function(function), rng="torch"), Function(function)


def same(got: Any, eager: Any, exact: Any) -> None:
    assert type(got) is type(eager)
    if isinstance(eager, (tuple, list)):
        for each in zip(got, eager, exact, strict=True):
            same(*each)
    else:
        assert_each_no_worse("result", got, eager, exact)


def assert_same_runs(modules: tuple[nn.Module, ...], run: Callable[[nn.Module], Any]) -> None:
    """Run the same calls in onnxtrain and in eager: results or errors, then gradients, must be equal up to rounding."""
    results: list[Any] = []
    modules = (*modules, copy.deepcopy(modules[1]).double())
    for module, context in zip(modules, (nullcontext, nullcontext, float64_by_default), strict=True):
        module.zero_grad()
        try:
            with context():
                results.append(run(module))
        except RuntimeError as error:
            results.append(f"raises {type(error).__name__}")
    same(*results)
    if isinstance(results[1], str):
        return  # a backward that raises may have accumulated some gradients
    same(*([p.grad for p in module.parameters()] for module in modules))
    same(*([b.clone() for b in module.buffers()] for module in modules))


def inputs() -> torch.Tensor:
    return torch.linspace(-2, 2, 3 * WIDTH).view(3, WIDTH)


# Outputs that are views of inputs

VIEWS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "itself": lambda m, x: x,
    "all of it": lambda m, x: x.view(-1),
    "transpose": lambda m, x: x.t(),
    "rows": lambda m, x: x[1:],
    "columns": lambda m, x: x[:, ::2],
    "unsqueezed": lambda m, x: x[None],
    "parameter": lambda m, x: m.weight,
    "view of a parameter": lambda m, x: m.weight[:3],
    "buffer": lambda m, x: m.table,
    "detached": lambda m, x: x.detach(),
    "same dtype": lambda m, x: x.to(x.dtype).contiguous(),
    "dropout in eval": lambda m, x: torch.nn.functional.dropout(x, 0.5, training=False),
    "identity": lambda m, x: nn.Identity()(x),
    "expanded": lambda m, x: x[None].expand(2, 3, WIDTH),
}


NEEDS = [pytest.param(False, id="plain"), pytest.param(True, id="needs-gradient")]


@pytest.mark.parametrize(("needs", "name"), covering(NEEDS, VIEWS))
def test_an_output_that_is_a_view_shares_memory_as_in_eager(needs: bool, name: str) -> None:
    modules = pair(lambda m, x: (VIEWS[name](m, x), x @ m.weight))

    def run(module: nn.Module) -> Any:
        x = inputs().requires_grad_(needs)
        view, product = module(x)
        source = (
            module.get_parameter("weight")
            if "parameter" in name
            else module.get_buffer("table")
            if name == "buffer"
            else x
        )
        facts = [
            view.data_ptr() == source[-view.shape[0] :].data_ptr()
            if name == "rows"
            else view.data_ptr() == source.data_ptr()
        ]
        facts += [view.requires_grad, view.is_leaf, view is source, view.stride(), view._is_view()]
        (product.sum() + (view.square().sum() if view.requires_grad else 0)).backward()
        return [*facts, view.detach().clone(), x.grad]

    for _ in range(2):
        assert_same_runs(modules, run)


@pytest.mark.parametrize("name", ["itself", "all of it", "rows", "columns", "dropout in eval"])
def test_a_change_of_a_view_changes_the_input(name: str) -> None:
    modules = pair(lambda m, x: (VIEWS[name](m, x), x @ m.weight))

    def run(module: nn.Module) -> Any:
        x = inputs()
        view, _ = module(x)
        view.mul_(3)
        return x

    assert_same_runs(modules, run)


def test_a_change_of_an_output_that_is_no_view_leaves_the_inputs() -> None:
    modules = pair(lambda m, x: (x + 0, m.bias * 1, m.table.clone(), x.clone()))

    def run(module: nn.Module) -> Any:
        x = inputs()
        with torch.no_grad():
            for output in module(x):
                output.mul_(3)
        return [x, [p.detach().clone() for p in module.parameters()]]

    assert_same_runs(modules, run)


def test_two_outputs_that_share_memory() -> None:
    modules = pair(lambda m, x: [(y := x @ m.weight), y, y.view(-1), y[1:]])

    def run(module: nn.Module) -> Any:
        with torch.no_grad():
            outputs = module(inputs())
            outputs[0][2].fill_(9)
        return [outputs, outputs[0] is outputs[1], outputs[2].data_ptr() == outputs[0].data_ptr()]

    assert_same_runs(modules, run)


LONE_VIEWS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "the only output": lambda m, x: [(x @ m.weight)[:, 1:]],
    "the only output, random": lambda m, x: [F.dropout(x @ m.weight).t()],
    "outputs of one backward": lambda m, x: [((h := torch.tanh(x @ m.weight)) @ m.weight)[:, 2:], h + m.bias],
    "outputs of a backward each": lambda m, x: [(x @ m.weight).view(-1), (x @ m.weight.t())[:, 2:], x + m.bias],
    "outputs of a backward each, random": lambda m, x: [F.dropout(x @ m.weight).t(), m.bias * 2],
    "a view by its kernel": lambda m, x: [F.linear(x[None], m.weight, m.bias)],
    "views by their kernels": lambda m, x: [F.linear(h := F.linear(x[None], m.weight, m.bias), m.weight, m.bias), h],
    "a view by its kernel, random": lambda m, x: [F.linear(F.dropout(x[None]), m.weight, m.bias), m.bias * 2],
}


@pytest.mark.parametrize("name", LONE_VIEWS)
def test_a_view_without_other_references_may_be_changed_under_autograd(name: str) -> None:
    modules = pair(LONE_VIEWS[name])

    def run(module: nn.Module) -> Any:
        torch.manual_seed(1)
        outputs = module(inputs())
        outputs[0].mul_(2)
        sum(output.square().sum() for output in outputs).backward()
        return outputs

    assert_same_runs(modules, run)
    assert not isinstance(run(modules[0]), str)


SEPARATE: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "equal values": lambda m, x: [(x * 2).view(-1), (x * 2).t(), x @ m.weight],
    "one without gradient": lambda m, x: [torch.relu(x @ m.weight).detach(), torch.relu(x @ m.weight)[1:]],
    "equal constants": lambda m, x: [torch.ones(2, 3).t(), torch.ones(2, 3).view(-1), x @ m.weight],
    "a view of a constant": lambda m, x: [torch.arange(6.0).view(2, 3), x @ m.weight],
}


@pytest.mark.parametrize("name", SEPARATE)
def test_a_change_of_an_output_changes_neither_another_nor_the_next_step(name: str) -> None:
    modules = pair(SEPARATE[name])

    def run(module: nn.Module) -> Any:
        first = module(inputs())
        with torch.no_grad():
            first[0].mul_(3)
        return [first, module(inputs())]

    assert_same_runs(modules, run)


# Changes between forward and backward

FORWARDS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "linear": lambda m, x: x @ m.weight + m.bias,
    "tanh": lambda m, x: torch.tanh(x @ m.weight),
    "softmax": lambda m, x: torch.softmax(x @ m.weight, -1),
    "relu": lambda m, x: torch.relu(x @ m.weight),
    "bias only": lambda m, x: x + m.bias,
    "square": lambda m, x: x * x * m.bias,
}
CHANGES: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], Any]] = {
    "nothing": lambda m, x, y: None,
    "weight": lambda m, x, y: m.get_parameter("weight").add_(1),
    "bias": lambda m, x, y: m.get_parameter("bias").add_(1),
    "input": lambda m, x, y: x.add_(1),
    "output": lambda m, x, y: y.add_(1),
}


@pytest.mark.parametrize("forward", slow_except(FORWARDS, "linear", "softmax", "square"))
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_before_backward_raises_where_eager_raises(forward: str, change: str) -> None:
    modules = pair(FORWARDS[forward])

    def run(module: nn.Module) -> Any:
        x = inputs()
        y = module(x)
        with torch.no_grad():
            CHANGES[change](module, x, y)
        y.backward(torch.ones_like(y))
        return None

    assert_same_runs(modules, run)


def test_an_output_changed_in_place_under_autograd() -> None:
    modules = pair(lambda m, x: x @ m.weight)

    def run(module: nn.Module) -> Any:
        y = module(inputs())
        y.mul_(m := y.detach().clone())
        y[0].tanh_()
        y.sum().backward()
        return [y.detach(), m]

    assert_same_runs(modules, run)


def test_the_loss_changed_in_place() -> None:
    modules = pair(lambda m, x: ((x @ m.weight).square().mean(), x @ m.weight))

    def run(module: nn.Module) -> Any:
        loss, _ = module(inputs())
        loss /= 4
        loss.backward()
        return loss.detach()

    assert_same_runs(modules, run)


# Inputs that forward changes


def _adds_in_place(module: Any, x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x @ module.weight


def _fills_rows(module: Any, x: torch.Tensor) -> torch.Tensor:
    before = x * 2
    x[1:].zero_()
    return before + x


@pytest.mark.parametrize("function", [_adds_in_place, _fills_rows])
def test_forward_changes_its_input(function: Callable[..., Any]) -> None:
    def run(module: nn.Module) -> Any:
        x = inputs()
        y = module(x)
        y.sum().backward()
        return [x, y.detach()]

    modules = pair(function)
    for _ in range(2):
        assert_same_runs(modules, run)


@pytest.mark.parametrize("function", [_adds_in_place, _fills_rows])
def test_forward_changes_an_input_that_has_a_gradient(function: Callable[..., Any]) -> None:
    def run(module: nn.Module) -> Any:
        leaf = inputs().requires_grad_()
        x = leaf * 1
        y = module(x)
        (y.sum() + x.sum()).backward()
        return [x.detach(), y.detach(), leaf.grad]

    modules = pair(function)
    for _ in range(2):
        assert_same_runs(modules, run)


def test_one_tensor_as_two_inputs_of_which_one_is_changed() -> None:
    def function(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y @ module.weight

    def run(module: nn.Module, same_tensor: bool) -> Any:
        x = inputs()
        y = module(x, x if same_tensor else inputs())
        return [x, y.detach()]

    modules = pair(function)
    for same_tensor in (False, True, False):
        assert_same_runs(modules, lambda module, same_tensor=same_tensor: run(module, same_tensor))


def test_inputs_that_overlap_of_which_one_is_changed() -> None:
    def function(module: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y @ module.weight

    def run(module: nn.Module) -> Any:
        x = torch.linspace(-2, 2, 5 * WIDTH).view(5, WIDTH)
        y = module(x[:3], x[2:])
        return [x, y.detach()]

    assert_same_runs(pair(function), run)


# Gradients


def test_two_gradients_do_not_share_memory() -> None:
    """Each is the cotangent itself. In eager they share memory, and accumulating into one changes the other."""
    module = ORTModule(Function(lambda m, x: x[0] + m.bias + m.square.view(-1)), rng="torch")
    for step in (1.0, 2.0, 3.0):
        y = module(inputs())
        cotangent = torch.ones_like(y)
        y.backward(cotangent)
        for name in ("bias", "square"):
            gradient = module.get_parameter(name).grad
            assert gradient is not None
            assert torch.equal(gradient, torch.full_like(gradient, step))
        assert torch.equal(cotangent, torch.ones_like(y))


def test_gradients_accumulate_over_backwards() -> None:
    modules = pair(lambda m, x: x[0] + m.bias + (x @ m.weight).tanh())

    def run(module: nn.Module) -> Any:
        first, second = module(inputs()), module(inputs() * 2)
        second.sum().backward()
        first.sum().backward(retain_graph=True)
        first.square().sum().backward()
        module(inputs()).sum().backward()

    assert_same_runs(modules, run)


def test_outputs_and_gradients_stay_as_they_are_in_later_steps() -> None:
    module = ORTModule(Function(lambda m, x: ((x @ m.weight).tanh(), m.bias * 2)), rng="torch")
    kept: list[torch.Tensor] = []
    for step in range(4):
        module.zero_grad(set_to_none=True)
        outputs = module(inputs() + step)
        (outputs[0].sum() * (step + 1) + outputs[1].sum()).backward()
        kept += [*outputs, *(p.grad for p in module.parameters() if p.grad is not None)]
        if step == 0:
            first = [t.detach().clone() for t in kept]
    assert all(map(torch.equal, kept[: len(first)], first))
    assert count_captures(module) == 1


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.inner = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.conv(x).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("images", "weights"),
    covering(
        [pytest.param(False, id="contiguous-images"), pytest.param(True, id="channels-last-images")],
        [pytest.param(True, id="channels-last-weights"), pytest.param(False, id="contiguous-weights")],
    ),
)
def test_channels_last(weights: bool, images: bool) -> None:
    def make() -> nn.Module:
        return Dense().to(memory_format=torch.channels_last) if weights else Dense()

    def call(draw: Draw, batch: int, length: int) -> Call:
        x = draw.floats(batch, 3, 5, 6)
        return Call((x.contiguous(memory_format=torch.channels_last) if images else x,))

    with compared(ZooModel("dense", make, call, lambda out: out.square().mean())) as compare:
        results = [side.train(2, 0) for side in compare.sides()[:2]]
        strides = [[g.stride() for g in r.gradients.values() if g is not None] for r in results]
        assert strides[0] == strides[1]
        compare.train(3, 0)
