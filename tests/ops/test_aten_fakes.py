"""Operators that lack a meta function in PyTorch: captured, with PyTorch's own gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.op_case import Spec
from tests.ops.captures import check_capture
from tests.thinned import slow_except


def targets(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(1, 6, shape, generator=generator)


@pytest.mark.parametrize("reduction", slow_except(["none", "sum", "mean"], "mean"))
def test_ctc_loss(reduction: str) -> None:
    """With different numbers of frames and labels on one capture."""

    def loss(scores: torch.Tensor, labels: torch.Tensor, frames: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(scores.log_softmax(-1), labels, frames, lengths, reduction=reduction, zero_infinity=True)

    check_capture(
        loss,
        Spec("t b 6"),
        Spec("b l", "int64", make=targets),
        Spec("b", "int64", low=6, high=8),
        Spec("b", "int64", low=1, high=4),
        sizes=[{"t": 8, "b": 3, "l": 4}, {"t": 11, "b": 2, "l": 5}],
        aten=True,
    )


@pytest.mark.parametrize("rows", slow_except([7, 3], 3), ids=["tall", "wide"])
def test_least_squares(rows: int) -> None:
    sizes = [{"b": 2}, {"b": 5}]
    solve = lambda a, b: torch.linalg.lstsq(a, b).solution
    check_capture(solve, Spec(f"b {rows} 4"), Spec(f"b {rows} 2"), sizes=sizes, aten=True)


@pytest.mark.slow
def test_least_squares_with_driver_gelsd_returns_residuals() -> None:
    solve = lambda a, b: tuple(torch.linalg.lstsq(a, b, driver="gelsd")[:2])
    check_capture(solve, Spec("b 7 4"), Spec("b 7 2"), sizes=[{"b": 2}, {"b": 3}], aten=True)
