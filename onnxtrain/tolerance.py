"""The one tolerance: an error of at most twice eager PyTorch's own, both against float64, plus rounding."""

from __future__ import annotations

import math

import torch


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
    if not torch.equal(got64[~finite].nan_to_num(nan=7.0), eager64[~finite].nan_to_num(nan=7.0)):
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
