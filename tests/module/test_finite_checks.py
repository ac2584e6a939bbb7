"""Branches on whether values are finite: a graph assumes that they are; a call with others runs in PyTorch."""

import copy
import random
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import onnxtrain
from onnxtrain import ORTModule
from onnxtrain.errors import CaptureError
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_matches

DISABLED = {"fallback_policy": "FALLBACK_DISABLE"}
WIDTH = 6


class Clamps(nn.Module):
    """As the encoder layers of DETR and BART."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if not torch.isfinite(x).all():
                x = torch.clamp(x, -1e3, 1e3)
        return x * 2


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))


def fails(x: torch.Tensor) -> torch.Tensor:
    assert x.max().isnan().sum() == 0, "NaN detected"
    return x


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "isfinite": lambda x: x if torch.isfinite(x).all() else -x,
    "isinf": lambda x: -x if torch.isinf(x).any() else x,
    "either": lambda x: -x if torch.isinf(x).any() or torch.isnan(x).any() else x,
    "or": lambda x: -x if (torch.isinf(x) | torch.isnan(x)).any() else x,
    "item": lambda x: -x if torch.isnan(x).any().item() else x,
    "count": fails,
    "along an axis": lambda x: x if torch.isfinite(x).all(-1).all() else -x,
    "in a checkpoint": lambda x: checkpoint(lambda t: t if t.isfinite().all() else -t, x, use_reentrant=False),
}


class Applies(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.inner.weight.data.abs_()  # so that infinity stays infinity
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FORMS[self.form](self.inner(x)) * 2


@pytest.mark.parametrize("form", FORMS)
def test_a_check_is_part_of_the_graph(form: str) -> None:
    eager = Applies(form)
    ours = ORTModule(copy.deepcopy(eager), **DISABLED)
    for size in (3, 1, 5):
        x = torch.randn(size, WIDTH)
        assert_matches(ours(x), eager, x)
    assert engine_of(ours).captures == 1
    x = torch.full((3, WIDTH), torch.nan if form in ("item", "count") else torch.inf)
    if form == "count":
        with pytest.raises(AssertionError, match="NaN detected"):
            ours(x)
    else:
        with pytest.warns(UserWarning, match=r"Applies runs this call in PyTorch.*test_finite_checks.py:"):
            assert same(ours(x), eager(x))
    x = torch.randn(2, WIDTH)
    assert_matches(ours(x), eager, x)
    assert engine_of(ours).captures == 1


def test_gradients_and_several_layers() -> None:
    eager = Clamps()
    ours = ORTModule(copy.deepcopy(eager), **DISABLED)
    for call, scale in enumerate((1.0, torch.inf, 2.0, 1e38, 1.0)):
        x = torch.randn(2 + call, WIDTH) * scale
        for module in (eager, ours):
            module.zero_grad()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Clamps runs this call in PyTorch")
                output = module(x)
            output.square().mean().backward()
        got, expected = ([p.grad for p in module.parameters()] for module in (ours, eager))
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, equal_nan=True)
    assert engine_of(ours).captures == 1


class ChangesState(nn.Module):
    """Dropout, running statistics and a Python number before the check."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.shape[0]
        x = F.dropout(self.norm(x), 0.5) * random.random()
        return x + 1 if torch.isfinite(x).all() else torch.nan_to_num(x)


def test_a_call_that_runs_in_pytorch_changes_state_once() -> None:
    results = []
    for wrap in (lambda m: m, lambda m: ORTModule(m, rng="torch", **DISABLED)):
        torch.manual_seed(3)
        random.seed(3)
        run = wrap(ChangesState())
        inner = run.module if isinstance(run, ORTModule) else run
        outputs = []
        for scale in (1.0, torch.inf, 1.0, torch.inf, 3.0):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="ChangesState runs this call in PyTorch")
                outputs.append(run(torch.ones(4, WIDTH).cumsum(0) * scale))
        results.append((outputs, inner.norm.num_batches_tracked, inner.seen, random.random(), torch.rand(2)))
    (eager, *states), (got, *own) = results
    torch.testing.assert_close(got, eager, equal_nan=True)
    assert [str(s) for s in states] == [str(s) for s in own]


def test_outputs_that_are_not_kept() -> None:
    class Several(Clamps):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            x = super().forward(x)
            return {"logits": x, "loss": x.square().mean()}

    eager = Several()
    ours = ORTModule(copy.deepcopy(eager), keep_outputs=("loss",), **DISABLED)
    for scale in (1.0, 2.0):
        x = torch.randn(3, WIDTH) * scale
        assert_matches(ours(x)["loss"], lambda module, x: module(x)["loss"], eager, x)
    with pytest.warns(UserWarning, match="runs this call in PyTorch"):
        assert same(ours(x * torch.inf)["loss"], eager(x * torch.inf)["loss"])


def test_second_derivatives() -> None:
    eager = Clamps()
    second = []
    for run in (eager, ORTModule(copy.deepcopy(eager), **DISABLED)):
        x = torch.ones(2, WIDTH, requires_grad=True)
        (gradient,) = torch.autograd.grad(run(x).pow(3).sum(), x, create_graph=True)
        second.append(torch.autograd.grad(gradient.sum(), x)[0])
    torch.testing.assert_close(second[1], second[0])


def test_eval_without_gradients() -> None:
    eager = Clamps().eval()
    ours = ORTModule(copy.deepcopy(eager), **DISABLED)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(3, WIDTH)
            assert_matches(ours(x), eager, x)
        with pytest.warns(UserWarning, match="runs this call in PyTorch"):
            assert same(ours(x * torch.inf), eager(x * torch.inf))


def test_prepared_blocks() -> None:
    eager = nn.Sequential(Clamps(1), Clamps(1))
    ours = onnxtrain.prepare(copy.deepcopy(eager))
    for size in (3, 2):
        x = torch.randn(size, WIDTH)
        assert_matches(ours(x), eager, x)
    with pytest.warns(UserWarning, match="runs this call in PyTorch"):
        assert same(ours(x * torch.inf), eager(x * torch.inf))


def test_other_tests_of_values_are_no_checks() -> None:
    class Compares(Clamps):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x if torch.isfinite(x).sum() > torch.rand(()) else -x

    with pytest.raises(CaptureError, match="branches in Python on tensor values"):
        ORTModule(Compares(), **DISABLED)(torch.randn(2, WIDTH))
