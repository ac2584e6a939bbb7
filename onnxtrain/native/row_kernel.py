"""A Triton kernel for rows of logits: their losses, and the gradients of the logits in the memory of the logits.

    logits[r, c], labels[r], factors[r]  ──>  losses[r];  logits = (softmax(logits) - one-hot label) * factor

One program runs a row, in float32. It reads the row twice, the second time from the cache if the row fits, and writes
it once. Only `ops/loss/row_losses.py` imports this module, where Triton is installed.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def run_row(  # type: ignore[no-untyped-def]
    logits, labels, factors, losses, row_stride, classes, columns, writes: tl.constexpr, block: tl.constexpr
):
    """Run a row of `columns` logits, of which those from `classes` on are padding: read as -inf, with gradients 0."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    label = tl.load(labels + row)
    is_class = (label >= 0) & (label < classes)  # else the results are NaN
    at_label = tl.load(logits + label, mask=is_class, other=float("nan")).to(tl.float32)
    largest = float("-inf")
    total = 0.0
    for start in range(0, classes, block):
        column = start + tl.arange(0, block)
        x = tl.load(logits + column, mask=column < classes, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # -inf - -inf is NaN
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), 0)
        largest = larger
    tl.store(losses + row, tl.log(total) - (at_label - largest))
    if writes:
        factor = tl.where(is_class, tl.load(factors + row), float("nan"))
        tl.debug_barrier()  # all threads have read the logit at the label
        for start in range(0, columns, block):
            column = start + tl.arange(0, block)
            x = tl.load(logits + column, mask=column < classes, other=float("-inf")).to(tl.float32)
            gradient = (tl.exp(x - largest) / total - tl.where(column == label, 1.0, 0.0)) * factor
            tl.store(logits + column, gradient.to(logits.dtype.element_ty), mask=column < columns)


def block_of(classes: int) -> int:
    """Return how many logits a program processes at once."""
    block: int = triton.next_power_of_2(min(max(classes, 16), 4096))
    return block


def run(logits: Any, classes: int, labels: Any, factors: Any, losses: Any, writes: bool) -> None:
    """Run all rows; see `run_row`."""
    run_row[(logits.shape[0],)](
        logits,
        labels,
        factors,
        losses,
        logits.stride(0),
        classes,
        logits.shape[1],
        writes=writes,
        block=block_of(classes),
        num_warps=8,
    )
