"""Products by a compiled kernel (`native/product.cpp`). docs/explanation/kernel-choice.md says where it is faster."""

from __future__ import annotations

import torch

from onnxtrain.native import Library, pointers, text
from onnxtrain.ops import huge_pages

LIBRARY = Library("product", text("vectors.h", "tiles.h", "product.cpp"), {"product": "ppppiiiiiii"})


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, alpha: float) -> torch.Tensor:
    """Alpha * a[..., m, k] @ b[k, n] + bias[n], float32 on a CPU.

    PyTorch's kernel runs where there are no elements, where those of a row do not lie in order, and until the compiled
    one is there.
    """
    rows = a.flatten(0, -2) if a.dim() > 1 else a.unsqueeze(0)
    transposed = b.stride(0) == 1 and b.stride(1) >= b.size(0)
    in_order = (transposed or _is_plain(b)) and _is_plain(rows) and (bias is None or bias.is_contiguous())
    if LIBRARY.functions is None or not in_order or not (rows.numel() and b.numel()):
        y = torch.matmul(a, b)
        y = y if bias is None else y.add_(bias)
        return y if alpha == 1 else y.mul_(alpha)
    y = huge_pages.empty((*a.shape[:-1], b.size(1)), a)
    sizes = (rows.size(0), b.size(1), b.size(0), rows.stride(0), b.stride(1 if transposed else 0), transposed)
    LIBRARY.functions.product(*pointers(rows, b, bias, y), *sizes, torch.get_num_threads())
    return y if alpha == 1 else y.mul_(alpha)


def _is_plain(x: torch.Tensor) -> bool:
    """Whether the elements of a row of this matrix lie in order."""
    return x.stride(1) == 1 and x.stride(0) >= x.size(1)
