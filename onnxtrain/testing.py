"""Compare results with eager PyTorch's within the tolerance, the only one in the project.

The error of a result against float64 may be at most twice that of eager PyTorch, plus rounding.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from onnxtrain.execute.tolerance import error_and_bound


def assert_no_worse_than_eager(
    name: str, got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, largest: float = 0.0
) -> None:
    """Fail if the error of `got` against `exact` (float64) exceeds the tolerance.

    Args:
        name: the tensor's name, for the message.
        got: the result in the dtype under test.
        eager: eager PyTorch's result in the same dtype.
        exact: the result in float64.
        largest: the model's largest |exact|. Rounding is relative to at least 1e-3 of it, for tensors near zero.
    """
    assert got.dtype == eager.dtype, f"{name}: dtype {got.dtype}, eager has {eager.dtype}"
    assert got.shape == eager.shape, f"{name}: shape {tuple(got.shape)}, eager has {tuple(eager.shape)}"
    assert exact.shape == eager.shape, (
        f"{name}: shape {tuple(eager.shape)}, in float64 {tuple(exact.shape)}: rounding decides on it"
    )
    error, allowed, scale = error_and_bound(got, eager, exact, largest)
    assert error <= allowed, (
        f"{name}: error {error:.3e} against float64, allowed {allowed:.3e} (scale {scale:.3e})\n"
        f"{_worst_element(got, eager, exact)}\n{got}\n{eager}"
    )


def _worst_element(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> str:
    mine, theirs, right = (t.detach().to("cpu", torch.complex128).flatten() for t in (got, eager, exact))
    differs = torch.view_as_real(mine).ne(torch.view_as_real(theirs)).any(-1) & ~(mine.isnan() & theirs.isnan())
    worst = int(torch.where(differs, (mine - right).abs().nan_to_num(nan=math.inf), -1).argmax())
    index = [int(i) for i in np.unravel_index(worst, got.shape)]
    return f"worst at {index}: got {got[*index].item()}, eager {eager[*index].item()}, float64 {exact[*index].item()}"
