"""Branches on values that depend on parameters or buffers: a graph assumes the answer, and each call checks it."""

import copy
import warnings

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.errors import CaptureError
from onnxtrain.frontend.ort_module import engine_of

DISABLED = {"fallback_policy": "FALLBACK_DISABLE"}
WIDTH = 4


class Doubles(nn.Module):
    """Branches on what a layer computes, counts its calls, and samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden: torch.Tensor = nn.functional.dropout(self.inner(x), 0.0)  # which does not sample
        if hidden.sum() > 0:
            hidden = hidden * 2
        return nn.functional.dropout(hidden, 0.5) + self.calls


def doubling(is_doubled: bool) -> nn.Module:
    module = Doubles()
    with torch.no_grad():
        module.inner.weight.fill_(1.0)
        module.inner.bias.fill_(1.0 if is_doubled else -10.0)
    return module


def assert_same_call(ours: nn.Module, eager: Doubles, x: torch.Tensor, seed: int) -> None:
    results = []
    for module in (ours, eager):
        torch.manual_seed(seed)
        results.append((module(x), torch.rand(1)))
    torch.testing.assert_close(*results)
    for grads in zip(
        *(
            torch.autograd.grad(r.square().sum(), m.parameters())
            for (r, _), m in zip(results, (ours, eager), strict=True)
        ),
        strict=True,
    ):
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("is_doubled", [True, False])
def test_a_graph_for_each_answer_that_lasts(is_doubled: bool) -> None:
    eager = doubling(is_doubled)
    ours = ORTModule(copy.deepcopy(eager), **DISABLED, rng="torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (3, 1, 5):
            assert_same_call(ours, eager, torch.rand(size, WIDTH), size)
    assert engine_of(ours).captures == 1
    for module in (ours.module, eager):
        with torch.no_grad():
            module.inner.bias.fill_(-10.0 if is_doubled else 1.0)
    with pytest.warns(UserWarning, match="runs this call in PyTorch, .* depends on the module's parameters"):
        assert_same_call(ours, eager, torch.rand(3, WIDTH), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (2, 4):
            assert_same_call(ours, eager, torch.rand(size, WIDTH), size)
    assert engine_of(ours).captures == 2
    assert ours.module.calls == eager.calls == 6


def test_answers_that_change_often_are_not_assumed() -> None:
    eager = doubling(True)
    ours = ORTModule(copy.deepcopy(eager), **DISABLED, rng="torch")
    x = torch.rand(2, WIDTH)
    assert_same_call(ours, eager, x, 0)
    for call in range(1, 11):  # each second one has another answer, and the next is captured again
        batch = x if call % 4 < 2 else -10 * x
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert_same_call(ours, eager, batch, call)
    assert engine_of(ours).captures == 5
    with pytest.raises(CaptureError, match="branches in Python on tensor values"):
        ours(-10 * x)


class Observes(nn.Module):
    """As the activations of I-BERT, which track the range of values; the first call initializes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.full((1,), -1e-5))
        self.register_buffer("most", torch.full((1,), 1e-5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        least, most = x.data.min(), x.data.max()
        assert least.isnan().sum() == 0
        assert most.isnan().sum() == 0
        if self.least.min() > -1.1e-5 and self.most.max() < 1.1e-5:
            self.least, self.most = self.least + least, self.most + most
        else:
            self.least, self.most = self.least * 0.9 + least * 0.1, self.most * 0.9 + most * 0.1
        return torch.clamp(x, self.least, self.most)


class Observed(nn.Module):
    """Calls its first observer twice: the second test depends on the parameters."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.observers = nn.ModuleList(Observes() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, observer in zip(self.layers, self.observers, strict=True):
            x = observer(layer(x))
        observed: torch.Tensor = self.observers[0](x)
        return observed


@pytest.mark.parametrize("layers", [1, 20])
def test_observers_of_ranges(layers: int) -> None:
    """20 layers: more branches on buffers than a call would check before the graph runs."""
    eager = Observed(layers)
    ours = ORTModule(copy.deepcopy(eager), **DISABLED)
    for size in (3, 1, 5, 3):
        x = torch.randn(size, WIDTH)
        got, expected = ours(x), eager(x)
        torch.testing.assert_close(got, expected)
        weights = ours.module.layers[0].weight, eager.layers[0].weight
        gradients = [torch.autograd.grad(y.square().sum(), w) for y, w in zip((got, expected), weights, strict=True)]
        torch.testing.assert_close(*gradients)
        torch.testing.assert_close(dict(ours.module.named_buffers()), dict(eager.named_buffers()))
    assert engine_of(ours).captures == 2
