"""The one tolerance, if the exact result is zero and all errors are rounding noise."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from onnxtrain.execute.tolerance import error_and_bound, is_noise, noisiest, perturbed


def backward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias before a batch norm: exactly zero."""
    module.zero_grad()
    module(x).square().mean().backward()
    gradient = module.get_parameter("0.bias").grad
    assert gradient is not None
    return gradient.clone()


def test_noise_is_judged_by_several_samples_of_eagers() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    x = torch.randn(4, 3, 9, 9)
    exact = backward(copy.deepcopy(module).double(), x.double())
    samples = [backward(sample, x) for sample in (module, *perturbed(module))]
    worst = noisiest(samples, exact)
    other_order = backward(module, x.flip(0))
    error, allowed, _ = error_and_bound(other_order, worst, exact)
    assert 0 < error <= allowed
    assert is_noise(error, exact)
    error, allowed, _ = error_and_bound(other_order * 10, worst, exact)
    assert error > allowed


def test_perturbed_parameters_are_off_by_one_rounding() -> None:
    module = nn.Linear(50, 50)
    before = module.weight.detach().clone()
    copies = [sample.get_parameter("weight").detach() for sample in perturbed(module)]
    assert torch.equal(module.weight, before)
    for weight, other in itertools.pairwise(copies):
        change = ((weight.double() - before) / before).abs()
        assert change.min() > 0
        assert change.max() < 2.1 * torch.finfo(torch.float32).eps
        assert not torch.equal(weight, other)


@pytest.mark.parametrize(("exact", "noise"), [(1e-17, True), (1e-9, False)])
def test_only_a_result_that_is_zero_is_noise(exact: float, noise: bool) -> None:
    assert is_noise(1e-8, torch.full((3,), exact, dtype=torch.float64)) is noise
