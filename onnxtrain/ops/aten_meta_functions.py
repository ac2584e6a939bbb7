"""Meta functions of PyTorch's operators that lack one: without it no module that calls them can be captured.

`ctc_loss` saves its forward probabilities for backward; their number depends on the longest target. `linalg.lstsq`
returns residuals only for matrices of full rank, else an empty tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onnxtrain.torch_compat import dispatch

Tensor = torch.Tensor


def ctc_loss_meta(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each sequence, and the tensor saved for backward."""
    # The saved tensor has 2 n + 1 columns for a longest target of n. If n is known at run time only, this is an upper
    # bound: the only reader is PyTorch's own backward, which takes any size.
    lengths_are_static = not isinstance(target_lengths, Tensor) and len(target_lengths)
    longest = 2 * (max(target_lengths) if lengths_are_static else targets.size(-1)) + 1
    if log_probs.dim() == 2:
        return log_probs.new_empty(()), log_probs.new_empty((1, log_probs.size(0), longest))
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, longest))


def lstsq_meta(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return solution, residuals, rank and singular values; those that the driver does not compute are empty."""
    rows, columns = a.shape[-2:]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[: a.dim() - 2])
    is_vector = a.dim() == b.dim() + 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    tail: Sequence[int] = () if is_vector else b.shape[-1:]
    driver = driver or ("gels" if a.device.type == "cuda" else "gelsy")
    has_residuals = rows > columns and driver != "gelsy"
    real = a.abs().dtype
    return (
        a.new_empty((*batch, columns, *tail)),
        a.new_empty((*batch, *tail), dtype=real) if has_residuals else a.new_empty((0,), dtype=real),
        a.new_empty(batch if driver != "gels" else (0,), dtype=torch.int64),
        a.new_empty((*batch, min(rows, columns)) if driver in ("gelsd", "gelss") else (0,), dtype=real),
    )


_LIBRARY = torch.library.Library("aten", "FRAGMENT")

for _name, _function in (
    ("aten::_ctc_loss", ctc_loss_meta),
    ("aten::_ctc_loss.Tensor", ctc_loss_meta),
    ("aten::linalg_lstsq", lstsq_meta),
):
    if not dispatch.has_fake(_name):  # PyTorch may have a kernel for meta tensors that FakeTensors refuse
        dispatch.register_fake(_LIBRARY, _name, _function)
