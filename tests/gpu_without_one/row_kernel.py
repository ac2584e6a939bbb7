"""The Triton kernel of cross entropy in Triton's interpreter, against float64.

TRITON_INTERPRET=1 python -m tests.gpu_without_one.row_kernel
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from onnxtrain.ops.loss import linear_cross_entropy as chunked
from onnxtrain.ops.loss.row_losses import rows_by_pytorch, run_kernel
from onnxtrain.testing import assert_no_worse_than_eager

SIZES = ((1, 1, 0), (3, 97, 31), (2, 9001, 63))  # rows, classes, columns of padding
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNEL = replace(
    chunked.ATEN, rows=lambda logits, classes, labels, factors, _: run_kernel(logits, classes, labels, factors)
)


def check_rows(rows: int, classes: int, padding: int, dtype: torch.dtype, scale: float) -> None:
    """Some logits are -inf, and the largest are in the last of several blocks.

    The first row has a block of -inf, and no gradient.
    """
    logits = ((torch.randn(rows, classes + padding) + torch.linspace(0, 9, classes + padding)) * scale).to(dtype)
    logits[:, 1:classes:7] = -torch.inf
    logits[0, : classes // 2] = -torch.inf
    labels = torch.randint(classes, (rows,)) // 7 * 7
    labels[0] = (classes - 1) // 7 * 7
    factors = torch.rand(rows).mul(2).sub(1)
    factors[0] = 0
    name = f"{rows} x {classes} + {padding}, {dtype}, scale {scale}"
    exact = rows_by_pytorch(logits.double(), classes, labels, factors.double(), torch.float64)
    eager = rows_by_pytorch(logits.clone(), classes, labels, factors, torch.float32)
    own = logits.clone()
    got = run_kernel(own, classes, labels, factors)
    for part, mine, theirs, right in zip(("losses", "gradients"), got, eager, exact, strict=True):
        assert mine is not None
        assert theirs is not None
        assert right is not None
        assert_no_worse_than_eager(f"{name}: {part}", mine, theirs, right)
    assert got[1] is own
    assert not own[:, classes:].any()
    losses, no_gradients = run_kernel(logits, classes, labels, None)
    assert torch.equal(losses, got[0])
    assert no_gradients is None


def check_labels_out_of_range() -> None:
    """They give NaN, not what is in memory beside a row."""
    losses, gradients = run_kernel(torch.randn(3, 5), 5, torch.tensor([5, -1, 4]), torch.ones(3))
    assert losses.isnan().tolist() == [True, True, False]
    assert gradients is not None
    assert gradients.isnan().all(1).tolist() == [True, True, False]


def check_linear(dtype: torch.dtype) -> None:
    """The whole op, with ignored rows, weights and a bias."""
    x, w, b = (torch.randn(shape).to(dtype) for shape in ((9, 16), (97, 16), (97,)))
    labels = torch.randint(97, (9,))
    labels[::4] = -100
    weights = torch.rand(97)

    def run(library: chunked.GemmLibrary, wide: torch.dtype | None = None) -> tuple[torch.Tensor | None, ...]:
        operands = (x, w, b) if wide is None else (x.to(wide), w.to(wide), b.to(wide))
        softmax_dtype = wide or torch.float32
        return chunked.linear_cross_entropy_with_gradients(
            *operands, labels, weights.to(softmax_dtype), 1, -100, softmax_dtype, library, mask=(True, True, True)
        )

    for name, got, eager, exact in zip(
        ("loss", "dx", "dw", "db"), run(KERNEL), run(chunked.ATEN), run(chunked.ATEN, torch.float64), strict=True
    ):
        assert got is not None
        assert eager is not None
        assert exact is not None
        assert_no_worse_than_eager(f"{dtype}: {name}", got, eager, exact)


def check_all() -> None:
    """Compare all cases, on the default device."""
    torch.manual_seed(0)
    for sizes, dtype, scale in itertools.product(SIZES, DTYPES, (1.0, 1000.0)):
        check_rows(*sizes, dtype, scale)
    check_labels_out_of_range()
    for dtype in DTYPES:
        check_linear(dtype)


if __name__ == "__main__":
    check_all()
