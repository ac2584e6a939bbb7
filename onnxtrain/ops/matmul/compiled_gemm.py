"""GEMMs with a compiled kernel (`native/gemm.cpp`). docs/explanation/kernel-choice.md says where it is faster."""

from __future__ import annotations

import torch

from onnxtrain.native import Library, pointers, read_sources
from onnxtrain.ops import huge_pages

LIBRARY = Library("gemm", read_sources("vectors.h", "gemm_tile.h", "tiles.h", "gemm.cpp"), {"gemm": "ppppiiiiiii"})


def gemm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, alpha: float) -> torch.Tensor:
    """`alpha` * a[..., m, k] @ b[k, n] + bias[n], float32 on a CPU.

    PyTorch's kernel runs for empty operands, for rows that are not contiguous, and until the compiled kernel is loaded.
    """
    rows = a.flatten(0, -2) if a.dim() > 1 else a.unsqueeze(0)
    transposed = b.stride(0) == 1 and b.stride(1) >= b.size(0)
    b_supported = transposed or _has_contiguous_rows(b)
    supported = b_supported and _has_contiguous_rows(rows) and (bias is None or bias.is_contiguous())
    if LIBRARY.functions is None or not supported or not (rows.numel() and b.numel()):
        y = torch.matmul(a, b)
        y = y if bias is None else y.add_(bias)
        return y if alpha == 1 else y.mul_(alpha)
    y = huge_pages.empty((*a.shape[:-1], b.size(1)), a)
    sizes = (rows.size(0), b.size(1), b.size(0), rows.stride(0), b.stride(1 if transposed else 0), transposed)
    LIBRARY.functions.gemm(*pointers(rows, b, bias, y), *sizes, torch.get_num_threads())
    return y if alpha == 1 else y.mul_(alpha)


def _has_contiguous_rows(x: torch.Tensor) -> bool:
    """Return whether each row of this matrix is contiguous, and rows do not overlap."""
    return x.stride(1) == 1 and x.stride(0) >= x.size(1)
