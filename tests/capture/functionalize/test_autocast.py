"""The graph applies autocast inside composite operators as eager does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onnxtrain import ORTModule
from onnxtrain.testing import assert_no_worse_than_eager
from tests.processor import skip_without_narrow_lstms
from tests.thinned import slow_except

WIDTH = 6


class Layers(torch.nn.Module):
    def __init__(self, run: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.run = run
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.cell = torch.nn.GRUCell(WIDTH, WIDTH)
        options: Any = {"num_layers": 2, "dropout": 0.5, "batch_first": True}
        self.rnn = torch.nn.RNN(WIDTH, WIDTH, **options)
        self.lstm = torch.nn.LSTM(WIDTH, WIDTH, **options)
        self.gru = torch.nn.GRU(WIDTH, WIDTH, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def einsum_without_autocast(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.einsum("bsh,bth->bst", x, x)


def einsum_with_autocast(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return torch.einsum("bsh,bth->bst", x, x)


def train(run: Any, module: Layers, x: torch.Tensor, autocast: bool) -> list[torch.Tensor]:
    """Return the output, then the gradients of x and of the parameters."""
    module.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        y = run(x)
    y.to(torch.promote_types(y.dtype, torch.float32)).square().sum().backward()
    return [y.detach(), *(t.grad for t in (x, *module.parameters()) if t.grad is not None)]


def check(run: Callable[[Any, torch.Tensor], torch.Tensor], autocast: bool = True, captured: bool = True) -> None:
    torch.manual_seed(0)
    module = Layers(run)
    wrapped = ORTModule(module, rng="torch")
    exact = Layers(run).double()
    exact.load_state_dict(module.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (3, 1, 4):
            x = torch.randn(batch, 5, WIDTH)
            results = train(wrapped, module, x, autocast)
            eager = train(module, module, x, autocast)
            references = train(exact, exact, x.double(), False)
            for result, theirs, reference in zip(results, eager, references, strict=True):
                assert_no_worse_than_eager("result", result, theirs, reference)
    messages = [str(w.message) for w in caught if "runs in PyTorch" in str(w.message)]
    assert len(messages) == (0 if captured else 1), messages
    assert captured or "autocast" in messages[0]


# Autocast casts inside each of these composite operators, not before it.
CAST_INSIDE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "einsum": lambda m, x: torch.einsum("bsh,bth->bst", x, x),
    "einsum with a linear before and a matmul after": lambda m, x: torch.einsum("bsh,bth->bst", x, m.linear(x)) @ x,
    "tensordot": lambda m, x: torch.tensordot(x, m.linear.weight, 1) * x,
    "matrix power": lambda m, x: torch.linalg.matrix_power(m.linear.weight, 3) + x.sum(),
    "multi_dot": lambda m, x: torch.linalg.multi_dot([x[0], x[0].t(), x[0]]),
    "cell": lambda m, x: m.cell(x[:, 0], x[:, 1]),
    "rnn": lambda m, x: m.rnn(x)[0] * x,
    "lstm": lambda m, x: m.lstm(x)[0] * x,
    "lstm's states": lambda m, x: m.lstm(x)[1][1],
    "gru": lambda m, x: m.gru(x)[0] * x,
    "inner, which calls another composite": lambda m, x: torch.inner(x, x[0]),
    "composites without casts": lambda m, x: F.layer_norm(m.linear(x), (WIDTH,)) + F.softmax(x, -1),
}


@pytest.mark.parametrize("name", slow_except(CAST_INSIDE, "einsum", "matrix power", "cell"))
def test_composites_cast_as_in_eager(name: str) -> None:
    if "lstm" in name:
        skip_without_narrow_lstms()
    check(CAST_INSIDE[name])


@pytest.mark.parametrize("name", slow_except(["lstm", "gru", "cell"], "lstm"))
def test_without_autocast_nothing_is_cast(name: str) -> None:
    check(CAST_INSIDE[name], autocast=False)


UNSUPPORTED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a composite where forward switches autocast off": einsum_without_autocast,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_casts_that_the_graph_cannot_express_fall_back(name: str) -> None:
    check(UNSUPPORTED[name], captured=False)


def test_autocast_that_forward_switches_on() -> None:
    check(einsum_with_autocast, autocast=False, captured=False)
    check(einsum_with_autocast, autocast=True)


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layer(x), labels)


def test_a_loss_under_float16_autocast_may_be_scaled() -> None:
    """Autocast computes cross entropy in float32, where GradScaler's first scale of 65536 does not overflow."""
    module, x, labels = Classifier(), torch.randn(6, 16), torch.randint(0, 5, (6,))

    def scaled(run: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        module.to(dtype).zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=dtype == torch.float32):
            loss = run(x.to(dtype), labels)
        (loss * 65536).backward()
        return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]

    exact, eager, results = (
        scaled(module, torch.float64),
        scaled(module, torch.float32),
        scaled(ORTModule(module), torch.float32),
    )
    assert results[0].dtype == torch.float32
    assert all(result.isfinite().all() for result in results)
    for name, result, theirs, reference in zip(("loss", "weight", "bias"), results, eager, exact, strict=True):
        assert_no_worse_than_eager(name, result, theirs, reference)
