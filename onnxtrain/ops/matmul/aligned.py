"""A kernel for a GPU: narrow matrices whose rows are not aligned are padded with zeros before the GEMM.

    y = x @ wᵀ, w[50257, h]      y = (x @ pad(w)ᵀ)[:, :50257]
    dx = dy @ w                  dx = pad(dy) @ pad(w)
    dw = dyᵀ @ x                 dw = (pad(dy)ᵀ @ x)[:50257]

Tensor cores read 16 bytes of a row at a time. If rows do not begin at a multiple of 16 bytes, cuBLAS chooses slower
kernels: on an H200, the three matmuls of GPT-2's vocabulary of 50,257 took 8 of the 15 ms of a step of 4,096 tokens,
seven times as long as at the speed of the others. Padding copies each operand once. It changes no result: a product
with a padded element is 0, and padded rows and columns are cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops.definition import Call, Kernel, NodeView, numel

DEVICES = frozenset({"cuda"})
NARROW = frozenset({ir.DataType.BFLOAT16, ir.DataType.FLOAT16})
_ALIGNED = 8  # elements of 16 bits in 16 bytes
_MULTIPLE = 64  # a tile of the GEMM
_MIN_PADDED_DIM = 4096  # of the padded dimension: a vocabulary
_MIN_OTHER_DIM = 256  # of the hidden dimension: the GEMM takes longer than the copies


class Padding(NamedTuple):
    """The rows and columns to add to a[m, k] @ b[k, n]."""

    m: int
    k: int
    n: int


def missing(size: Size) -> int:
    """Return what a vocabulary lacks to the next aligned size; 0 for symbolic, aligned and small sizes."""
    if not isinstance(size, int) or size < _MIN_PADDED_DIM or size % _ALIGNED == 0:
        return 0
    return -size % _MULTIPLE


def pads_vocabulary(device: str, dtype: ir.DataType, classes: Size, width: Size) -> bool:
    """Return whether padding a weight [classes, width] on this device is faster."""
    is_wide = isinstance(width, int) and width >= _MIN_OTHER_DIM and width % _ALIGNED == 0
    return device in DEVICES and dtype in NARROW and is_wide and missing(classes) > 0


def padded(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Append rows and columns of zeros to matrix[..., m, n]; a transposed matrix stays transposed in memory."""
    if not rows and not columns:
        return matrix
    if matrix.dim() == 2 and matrix.stride(0) == 1 != matrix.stride(1):
        return torch.nn.functional.pad(matrix.t(), (0, rows, 0, columns)).t()
    return torch.nn.functional.pad(matrix, (0, columns, 0, rows))


def padded_gemm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, m: int, k: int, n: int) -> torch.Tensor:
    """Compute a[..., m, k] @ b[k, n] + bias[n] by a GEMM of operands with so many more rows and columns."""
    rows = a.flatten(0, -2) if a.dim() > 2 else a
    left, right = padded(rows, m, k), padded(b, k, n)
    if bias is not None and n:
        bias = torch.nn.functional.pad(bias, (0, n))
    y = torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
    if m or n:
        y = y[: rows.size(0), : b.size(1)].contiguous()
    return y.view(*a.shape[:-1], b.size(1))


def padding_kernel(operands_of: Callable[..., Any], dims: Callable[..., tuple[int, ...]]) -> Kernel:
    """Return the kernel of a matmul op; see `candidates.matmul_kernels` for the arguments."""

    def padding_of(n: NodeView) -> Padding | None:
        """Return the padding of a node; None if it has no unaligned vocabulary."""
        gemm = operands_of(n, *[None] * len(n.definition.inputs))
        a = n.node.inputs[0]
        if gemm is None or a is None or dtype_of(a) not in NARROW or not gemm.b_is_matrix or gemm.alpha != 1:
            return None
        shapes = [
            tuple(d if isinstance(d, int) else 0 for d in sizes.dims_of(v)) for v in n.node.inputs[:2] if v is not None
        ]
        m, k, n_dim, _ = dims(n, shapes)
        if gemm.weight_gradient is not None:  # the reduced dimension is that of the tokens
            padding, others = Padding(missing(m), 0, missing(n_dim)), (m, n_dim)
        else:
            padding, others = Padding(0, missing(k), missing(n_dim)), (k, n_dim)
        is_worthwhile = min(others) >= _MIN_OTHER_DIM and any(padding)
        return padding if is_worthwhile else None

    def lower(n: NodeView, *arguments: Any) -> Call:
        gemm, padding = operands_of(n, *arguments), padding_of(n)
        assert padding is not None, "this kernel does not apply to the node"
        return Call(padded_gemm, gemm.a, gemm.b, gemm.bias, *padding)

    def workspace(n: NodeView) -> Size:
        a, b, y = n.node.inputs[0], n.node.inputs[1], n.node.outputs[0]
        padding = padding_of(n)
        assert padding is not None, "this kernel does not apply to the node"
        copied = [v for v, pads in ((a, padding.m or padding.k), (b, padding.k or padding.n), (y, padding.n)) if pads]
        return sizes.multiply(2, sizes.add(*map(numel, copied)))

    return Kernel(
        lower=lower,
        applies=lambda n, device: device in DEVICES and padding_of(n) is not None,
        workspace_bytes=workspace,
    )
