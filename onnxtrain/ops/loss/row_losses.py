"""Losses of rows of logits, and the gradients of the logits: by PyTorch's operators, or by one Triton kernel on a GPU.

PyTorch's operators read and write a chunk of logits some ten times, in float32: 52 bytes for each logit in bfloat16.
The kernel (`native/row_kernel.py`) moves 6. Before it is used, its results are compared with those of PyTorch's
operators, once for each device and kind of call; the host waits for that. If it fails or differs, a warning says so,
and PyTorch's operators run from then on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from onnxtrain.log import warn_once

Tensor = torch.Tensor
# logits[r, c], classes, labels, factors, dtype -> losses, gradients. Columns from `classes` on are padding; each row's
# factor multiplies its gradient, which is computed if there are factors; dtype is that of the computation.
RowFunction = Callable[[Tensor, int, Tensor, Tensor | None, torch.dtype], tuple[Tensor, Tensor | None]]
_Kind = tuple[torch.device, torch.dtype, int, bool]
_agrees: dict[_Kind, bool] = {}
_TOLERANCE = 1e-3  # relative; a wrong kernel differs by more


def rows_by_pytorch(
    logits: Tensor, classes: int, labels: Tensor, factors: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the losses and gradients; may overwrite the logits."""
    own_dtype = logits.dtype
    logits = logits.to(dtype)  # frees the narrow ones
    losses, softmax = _losses(logits[:, :classes], labels, factors is not None)
    if softmax is None or factors is None:
        return losses, None
    _logit_gradients(softmax, labels, factors)
    if classes < logits.size(1):
        logits[:, classes:] = 0
    return losses, logits.to(own_dtype)  # the gradients are in the memory of the logits


def rows_by_triton(
    logits: Tensor, classes: int, labels: Tensor, factors: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the same by the kernel, if it is right on this device; dtype is float32."""
    if type(logits) is not Tensor or not logits.numel():  # a trace has fake tensors
        return rows_by_pytorch(logits, classes, labels, factors, dtype)
    kind = (logits.device, logits.dtype, classes, factors is not None)
    if kind not in _agrees and not torch.cuda.is_current_stream_capturing():
        _agrees[kind] = _kernel_agrees(logits, classes, labels, factors, dtype)
    if not _agrees.get(kind):
        return rows_by_pytorch(logits, classes, labels, factors, dtype)
    return run_kernel(logits, classes, labels, factors)


def run_kernel(logits: Tensor, classes: int, labels: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Run the kernel; overwrites the logits if there are factors."""
    losses = torch.empty(logits.size(0), dtype=torch.float32, device=logits.device)
    kernel = importlib.import_module("onnxtrain.native.row_kernel")
    kernel.run(logits, classes, labels, losses if factors is None else factors, losses, factors is not None)
    return losses, None if factors is None else logits


def _kernel_agrees(logits: Tensor, classes: int, labels: Tensor, factors: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether the kernel runs, and its results are right up to rounding; a warning says so if not."""
    expected = rows_by_pytorch(logits.clone(), classes, labels, factors, dtype)
    try:
        got = run_kernel(logits.clone(), classes, labels, factors)
        triples = zip(("losses", "gradients"), got, expected, strict=True)
        wrong = [name for name, own, right in triples if not (own is None or right is None or _are_close(own, right))]
        problem = f"its {' and '.join(wrong)} differ from those of the operators that it replaces" if wrong else ""
    except Exception as error:  # noqa: BLE001  # whatever Triton, its compiler or the driver raises
        problem = f"{type(error).__name__}: {error}"
    if problem:
        warn_once(f"the Triton kernel of cross entropy is not used on {logits.device}: {problem}")
    return not problem


def _are_close(got: Tensor, expected: Tensor) -> bool:
    """Return whether the elements agree up to rounding of the largest finite one."""
    finite = expected[expected.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    tolerance = max(_TOLERANCE, 2 * torch.finfo(expected.dtype).eps)
    return torch.allclose(got, expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _losses(logits: Tensor, labels: Tensor, needs_softmax: bool) -> tuple[Tensor, Tensor | None]:
    """-log softmax at each label; and, if needed, the softmax, in the memory of the logits.

    The largest logit is subtracted from the label's logit, not added to log_sum: a sum would lose the low-order bits
    of a small loss of large logits.
    """
    shifted = logits.sub_(logits.amax(1, keepdim=True))
    at_label = shifted.gather(1, labels[:, None])
    powers = shifted.exp_()
    sums = powers.sum(1, keepdim=True)
    losses = sums.log().sub_(at_label).squeeze(1)
    return losses, powers.div_(sums) if needs_softmax else None


def _logit_gradients(softmax: Tensor, labels: Tensor, factors: Tensor) -> Tensor:
    """(softmax - one-hot label) times the row's factor, in place."""
    factor, label = factors[:, None], labels[:, None]
    at_label = (softmax.gather(1, label) - 1) * factor
    return softmax.mul_(factor).scatter_(1, label, at_label)
