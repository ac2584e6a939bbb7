"""The one tolerance, where the exact result is zero and all errors are rounding noise."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from onnxtrain.execute.tolerance import error_and_bound, is_noise, noisiest, perturbed
from onnxtrain.testing import assert_no_worse_than_eager


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_infinity_match_only_themselves(dtype: torch.dtype) -> None:
    special = torch.tensor([1.0, math.nan, math.inf, -math.inf, 0.0], dtype=dtype)
    assert_no_worse_than_eager("equal", special.clone(), special, special.double())
    for index in range(len(special)):
        for wrong in (2.0, 7.0, torch.finfo(dtype).max, math.nan, math.inf, -math.inf):
            got = special.clone()
            got[index] = wrong
            if torch.allclose(got, special, rtol=0, atol=0, equal_nan=True):
                continue
            with pytest.raises(AssertionError):
                assert_no_worse_than_eager("another", got, special, special.double())


def test_other_elements_are_judged_beside_nan_and_infinity() -> None:
    exact = torch.tensor([math.nan, math.inf, 1.0], dtype=torch.float64)
    eager = exact.float()
    assert_no_worse_than_eager("rounded", eager + 1e-7, eager, exact)
    with pytest.raises(AssertionError, match=r"worst at \[2\]"):
        assert_no_worse_than_eager("wrong", eager + torch.tensor([0, 0, 1e-3]), eager, exact)


def test_results_of_another_dtype_are_refused() -> None:
    exact = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="dtype"):
        assert_no_worse_than_eager("half", exact.half(), exact.float(), exact)


def test_float64_cannot_judge_a_shape_on_which_rounding_decides() -> None:
    got = torch.ones(3)
    with pytest.raises(AssertionError, match=r"shape \(3,\), in float64 \(2,\): rounding decides"):
        assert_no_worse_than_eager("keypoints", got, got, torch.ones(2).double())
