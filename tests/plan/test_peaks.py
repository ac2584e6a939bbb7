"""The peak memory of a step without a budget, against eager PyTorch: allocator events, with gradients allocated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.execute.boundary import _Boundary
from tests.plan.measured import peak_of
from tests.zoo import huggingface
from tests.zoo.checks import Wrap, ours
from tests.zoo.entry import ZooModel
from tests.zoo.models import ZOO

TRANSFORMERS = {*(m.name for m in huggingface.MODELS), "transformer-encoder"}
FAST = {"mlp", "lstm"}
LARGE = {"resnet": (16, 24)}  # where neither of the two below fits


def large(entry: ZooModel) -> tuple[int, int]:
    """A batch and a length at which activations outweigh gradients: these leave backward together, at its end."""
    return LARGE.get(entry.name, (16, 32) if entry.sizes[0][1] else (256, 0))


def zoo_peak(entry: ZooModel, wrap: Wrap) -> int:
    run, call = wrap(entry.build()), entry.arguments(*large(entry))

    def step() -> None:
        entry.loss(run(*call.args, **call.kwargs)).backward()  # type: ignore[no-untyped-call]

    step()
    return peak_of(step)


@pytest.mark.parametrize(
    "entry",
    [pytest.param(m, marks=() if m.name in FAST else pytest.mark.slow) for m in ZOO if m.falls_back is None],
    ids=str,
)
def test_no_model_holds_more_than_eager(entry: ZooModel) -> None:
    """Drawn as in eager, so that masks are kept and no compiled kernel comes in between."""
    share = 0.75 if entry.name in TRANSFORMERS else 1.0
    assert zoo_peak(entry, ours) <= share * zoo_peak(entry, lambda module: module)


@pytest.mark.skipif(not hasattr(torch.autograd.Function, "boxed_grads_call"), reason="new in PyTorch 2.13")
def test_a_cotangent_is_freed_after_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all cotangents in a tuple, autograd holds them until backward ends."""
    net = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 128))
    x = torch.randn(256, 32)

    def peak() -> int:
        model = ORTModule(net, rng="torch")
        step = lambda: model(x).square().sum().backward()
        step()
        return peak_of(step)

    freed = peak()
    monkeypatch.setattr(_Boundary, "boxed_grads_call", False)
    assert freed + 256 * 128 * 4 <= peak()
