"""The one tolerance: an error of at most twice eager PyTorch's own, both against float64, plus rounding.

If the terms of a result cancel, as those of the gradient of a bias before a batch norm, the exact result is zero and
eager's error is one sample of rounding noise. Two such samples of 8 elements differ by more than a factor of 2 in 5 %
of all cases, so eager's error is then the largest of several samples (`perturbed`, `noisiest`): 0.02 % with 8 of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator

import torch

_SAMPLES = 7  # besides the first


def error_and_bound(
    got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, largest: float = 0.0
) -> tuple[float, float, float]:
    """Return the largest absolute error of a result, the bound on it, and the scale of rounding.

    The error is infinite if one result is finite where the other is not, or if integers differ.

    Args:
        got: the result in the dtype under test.
        eager: the result of eager PyTorch, of the same shape and dtype.
        exact: the result in float64.
        largest: the model's largest |exact|; 1e-3 of it is the rounding scale of tensors that are nearly zero.
    """
    if not got.is_floating_point():
        return (0.0 if torch.equal(got, eager) else math.inf), 0.0, 0.0
    got64, eager64, exact = (t.detach().to("cpu", torch.float64) for t in (got, eager, exact))
    finite = torch.isfinite(eager64) & torch.isfinite(exact)
    if not torch.isclose(got64[~finite], eager64[~finite], rtol=0.0, atol=0.0, equal_nan=True).all():
        return math.inf, 0.0, 0.0
    if not finite.any():
        return 0.0, 0.0, 0.0
    got64, eager64, exact = got64[finite], eager64[finite], exact[finite]
    scale = max(exact.abs().max().item(), 1e-3 * largest)
    rounding = torch.finfo(got.dtype).eps * scale
    if got.dtype == torch.float64:
        return (got64 - eager64).abs().max().item(), 64 * rounding, scale
    error = (got64 - exact).abs().max().item()
    return error, 2 * (eager64 - exact).abs().max().item() + 8 * rounding, scale


def differs_grossly(got: torch.Tensor, expected: torch.Tensor, largest: float, eps: float) -> bool:
    """Return whether two results differ by more than those of any two correct programs.

    This notices a wrong program where float64 cannot judge: while a model trains. Half of the digits must agree.

    Args:
        got: a result.
        expected: the result of the other program, of the same dtype.
        largest: the largest |expected| of all results; 1e-3 of it is the scale of tensors that are nearly zero.
        eps: of the least precise dtype that the programs compute in.
    """
    if not got.is_floating_point():
        return not torch.equal(got, expected)
    finite = torch.isfinite(expected)
    if not torch.equal(got.isfinite(), finite):
        return True
    got, expected = got[finite].float(), expected[finite].float()
    if not expected.numel():
        return False
    scale = max(expected.abs().max().item(), 1e-3 * largest)
    return (got - expected).abs().max().item() > 4 * math.sqrt(eps) * scale


def is_noise(error: float, exact: torch.Tensor) -> bool:
    """Return whether the exact result is zero, compared with an error: its terms cancel."""
    return exact.numel() > 0 and exact.abs().max().item() <= 1e-6 * error


def perturbed(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield copies of a module, with each parameter element multiplied by 1 + eps or 1 - eps at random."""
    for sample in range(_SAMPLES):
        generator = torch.Generator().manual_seed(sample)
        copied = copy.deepcopy(module)
        with torch.no_grad():
            for parameter in copied.parameters():
                if parameter.is_floating_point():
                    signs = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter) * 2 - 1
                    parameter.mul_(1 + torch.finfo(parameter.dtype).eps * signs)
        yield copied


def noisiest(samples: Iterable[torch.Tensor], exact: torch.Tensor) -> torch.Tensor:
    """Return the sample with the largest error."""
    return max(samples, key=lambda sample: (sample.double() - exact).abs().max().item())
