"""Errors in a step: the model's own error is raised, the state is intact, and the next step works."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain import ORTModule
from onnxtrain.errors import ORTModuleTorchModelException
from onnxtrain.frontend.ort_module import engine_of
from tests.thinned import covering
from tests.torch_version import TORCH

PACKAGE = Path(onnxtrain.__file__).parent


class Faults:
    """The side effects of a step of `Net`."""

    in_forward: Callable[[], object] | None = None
    in_backward: Callable[[], object] | None = None


class Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if Faults.in_forward is not None and not torch.compiler.is_exporting():
            Faults.in_forward()
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Faults.in_backward is not None:
            Faults.in_backward()
        return gradient * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(Watched.apply(self.linear(x)))
        return result.square().mean()


def interrupt() -> None:
    raise KeyboardInterrupt


def fail() -> None:
    raise ZeroDivisionError("the user's own")


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], object] | None], None]:
    return lambda where, action: monkeypatch.setattr(Faults, where, action)


def step(run: nn.Module, module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Run a step; returns loss, gradients and buffers."""
    module.zero_grad()
    loss = run(x)
    loss.backward()
    state = {"loss": loss.detach()} | {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return state | {name: b.clone() for name, b in module.named_buffers()}


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ORTModule": lambda net: ORTModule(net, kernels="pytorch"),
    "prepare": lambda net: onnxtrain.prepare(net, kernels="pytorch"),
}


@pytest.mark.parametrize("wrap", list(WRAPS))
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize(("action", "where"), covering([interrupt, fail], ["in_forward", "in_backward"]))
def test_the_step_after_a_fault_equals_eager(
    wrap: str, first: bool, where: str, action: Callable[[], object], faults: Callable[..., None]
) -> None:
    torch.manual_seed(0)
    net, eager = Net(), Net()
    eager.load_state_dict(net.state_dict())
    run = WRAPS[wrap](net)
    x = torch.randn(3, 4)
    error = KeyboardInterrupt if action is interrupt else ZeroDivisionError
    if not first:
        step(run, net, x), step(eager, eager, x)
    faults(where, action)
    for subject, module in ((run, net), (eager, eager)):
        with pytest.raises(error):
            step(subject, module, x)
    faults(where, None)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    for _ in range(2):
        got, want = step(run, net, x), step(eager, eager, x)
        assert got.keys() == want.keys()
        for name in want:
            assert torch.equal(got[name], want[name]), name


def test_a_module_that_raises_raises_its_own_error_and_works_afterwards() -> None:
    class Checks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)
            self.refuses = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.refuses:
                raise LookupError("not yet")
            return self.linear(x)

    net = Checks()
    ort = ORTModule(net, kernels="pytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it raises in PyTorch too, which is not a fallback
        with pytest.raises(LookupError, match="not yet"):
            ort(torch.randn(3, 4))
    net.refuses = False
    x = torch.randn(3, 4)
    assert torch.equal(ort(x), net(x))
    assert engine_of(ort).captures == 1


class Crooked(nn.Module):
    """Its matmul has mismatched shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.linear(x))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, 3)


@pytest.mark.parametrize("wrap", list(WRAPS))
def test_the_traceback_of_a_model_error_shows_only_user_frames(
    wrap: str, faults: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    def functions(run: Callable[[], object], error: type[Exception]) -> list[str]:
        with pytest.raises(error) as caught:
            run()
        assert caught.value.__context__ is None
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert not [frame for frame in frames if str(PACKAGE) in frame.filename or frame.filename[0] == "<"], frames
        return [frame.name for frame in frames if frame.filename == __file__]

    x = torch.randn(3, 4)
    crooked = WRAPS[wrap](Crooked())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names = functions(lambda: crooked(x), RuntimeError)
    assert names[-2:] == ["forward", "inner"]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING and "initialisation" not in r.getMessage()]
    net = WRAPS[wrap](Net())
    loss = net(x)
    faults("in_forward", fail)
    assert functions(lambda: net(x), ZeroDivisionError)[-2:] == ["forward", "fail"]
    if TORCH < (2, 13):
        pytest.skip("PyTorch before 2.13 calls our backward as a Python function: Python adds its frame")
    faults("in_backward", fail)
    assert functions(loss.backward, ZeroDivisionError)[-2:] == ["backward", "fail"]


def test_errors_of_onnxtrain_keep_their_frames() -> None:
    with pytest.raises(ORTModuleTorchModelException) as caught:
        ORTModule(Crooked(), fallback_policy="FALLBACK_DISABLE")(torch.randn(3, 4))
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame for frame in frames if str(PACKAGE) in frame.filename]


def test_an_interrupt_while_the_module_is_captured_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    attributes = {name: list(vars(module)) for name, module in net.named_modules()}
    ort = ORTModule(net, kernels="pytorch")
    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: interrupt())
    with pytest.raises(KeyboardInterrupt):
        ort(torch.randn(3, 4))
    monkeypatch.undo()
    assert {name: list(vars(module)) for name, module in net.named_modules()} == attributes
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert "__getattribute__" not in vars(nn.Module)
    ort(torch.randn(3, 4)).backward()
    assert engine_of(ort).captures == 1
