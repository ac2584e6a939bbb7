"""Candidate kernels of the matmul ops, and the cost model of each.

    (no name)      on a GPU, padded operands for vocabularies that are not aligned (`aligned`); there is then no other
    aten           PyTorch's own kernel: MKL for float32 and float64, oneDNN for narrower dtypes
    large pages    the same, with the result in newly allocated huge pages: for results of 32 MB and more
    onednn         oneDNN's inner product, which reads a transposed right operand without a copy
    convolution    a weight gradient dyᵀ @ x as the backward of a 1×1 convolution: no operand is transposed in memory
    compiled       our own kernel (`compiled_gemm`): for n much larger than k
    float32        narrow operands are widened and the result is rounded: as exact, and faster if the processor has no
                   instructions for the narrow dtype

The convolution's backward could compute the bias gradient too. It is not used: at 2048 rows its error is 12 times that
of a sum, more than the one tolerance allows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import huge_pages
from onnxtrain.ops.cost_model import Shapes, expected_seconds, widening_seconds
from onnxtrain.ops.definition import Call, Kernel, NodeView, numel
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.matmul import compiled_gemm
from onnxtrain.ops.matmul.aligned import NARROW, padding_kernel
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.system.machine import Machine, current_machine
from onnxtrain.torch_compat import aten_kernels


@dataclass(frozen=True)
class GemmOperands:
    """The operands of y = alpha * a @ b + bias, as arguments of a Call.

    Attributes:
        a: [..., m, k]; a view if the node transposes it.
        b: [k, n], or [..., k, n] for a batched matmul; a view if the node transposes it.
        bias: [n], or None.
        alpha: the scalar factor.
        b_is_matrix: whether b is a matrix, not a batch of matrices.
        weight_gradient: for a weight gradient aᵀ @ b of two matrices, the untransposed operands; else None.
    """

    a: Any
    b: Any
    bias: Any = None
    alpha: float = 1.0
    b_is_matrix: bool = True
    weight_gradient: tuple[Any, Any] | None = None


GemmDims = tuple[int, int, int, int]  # m, k, n and the batch size; if b is a matrix, m includes the batch of a


def gemm_dims(a: tuple[int, ...], b: tuple[int, ...]) -> GemmDims:
    """Return the dimensions of a[..., m, k] @ b[..., k, n], from the shapes after transpositions."""
    k, n = (b[-2], b[-1]) if len(b) > 1 else (b[0], 1)
    if len(b) <= 2:
        return math.prod(a[:-1]), k, n, 1
    batch = math.prod(torch.broadcast_shapes(a[:-2], b[:-2]))
    return a[-2] if len(a) > 1 else 1, k, n, batch


# Kernels


def gemm_in_large_pages(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, alpha: float) -> torch.Tensor:
    """`alpha` * a[..., m, k] @ b[k, n] + bias[n], with the result in huge pages."""
    y = huge_pages.empty((*a.shape[:-1], b.size(1)), a)
    rows, out = a.flatten(0, -2), y.flatten(0, -2)
    if bias is None:
        torch.mm(rows, b, out=out)
    else:
        torch.addmm(bias, rows, b, out=out)
    return y if alpha == 1 else y.mul_(alpha)


def onednn_gemm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, alpha: float) -> torch.Tensor:
    """`alpha` * a[..., m, k] @ b[k, n] + bias[n] with oneDNN, which does not support k = 0."""
    if b.size(0) == 0:
        zeros = torch.matmul(a, b)
        return zeros if bias is None else zeros.add_(bias)
    y = aten_kernels.onednn_linear(a, b.t(), bias, "none", [], "")
    return y if alpha == 1 else y.mul_(alpha)


def gemm_in_float32(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, alpha: float) -> torch.Tensor:
    """`alpha` * a @ b + bias, computed in float32 and rounded to the dtype of `a`."""
    y = torch.matmul(a.float(), b.float())
    if alpha != 1:
        y.mul_(alpha)
    if bias is not None:
        y.add_(bias)
    return y.to(a.dtype)


def _image_height(rows: int) -> int:
    """Return the height of the images that the rows are reshaped to, one that oneDNN has a kernel for.

    0 if none divides.
    """
    return next((height for height in (128, 64, 32, 16) if rows % height == 0), 0)


def gemm_by_convolution(dy: torch.Tensor, x: torch.Tensor, alpha: float) -> torch.Tensor:
    """`alpha` * dyᵀ @ x of dy[t, n] and x[t, k], as a convolution if t is a multiple of 16, else with torch.mm."""
    rows, n = dy.shape
    k = x.size(1)
    height = _image_height(rows)
    if height == 0 or dy.numel() == 0 or x.numel() == 0:
        y = torch.mm(dy.t(), x)
    else:
        images = [
            v.contiguous().view(rows // height, height, 1, v.size(1)).permute(0, 3, 1, 2) for v in (dy, x)
        ]  # channels_last
        weight = x.new_empty(()).expand(n, k, 1, 1)  # only its shape is read
        _, y, _ = torch.ops.aten.convolution_backward(
            *images, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
        )
        y = y.view(n, k)
    return y if alpha == 1 else y.mul_(alpha)


# Cost model


def _seconds(speed: str, dims: GemmDims, machine: Machine, dtype: torch.dtype = torch.float32) -> float:
    return expected_seconds(speed, 2.0 * math.prod(dims), machine, dtype)


def _large_pages_seconds(dims: GemmDims, machine: Machine, dtype: torch.dtype) -> float:
    """Slightly less than with small pages; not tried for sizes whose memory the allocator reuses."""
    m, _, n, _ = dims
    gains = m * n * dtype.itemsize >= huge_pages.LARGE
    return 0.95 * _seconds("aten", dims, machine, dtype) if gains else math.inf


def _convolution_seconds(dims: GemmDims, machine: Machine) -> float:
    return _seconds("convolution", dims, machine) if _image_height(dims[1]) else math.inf


def _float32_seconds(dims: GemmDims, machine: Machine) -> float:
    m, k, n, batch = dims
    return _seconds("aten", dims, machine) + widening_seconds(batch * (m * k + k * n + m * n), machine)


DimsOf = Callable[[NodeView, Shapes], GemmDims]
OperandsOf = Callable[..., GemmOperands | None]


def matmul_kernels(lower: Callable[..., Call], operands_of: OperandsOf, dims: DimsOf) -> tuple[Kernel, ...]:
    """Return all candidate kernels of a matmul op.

    Args:
        lower: from the node and the arguments, PyTorch's own call.
        operands_of: from the node and the arguments, the operands of the GEMM for the other libraries; None if they
            cannot compute the node.
        dims: from the node and the shapes of its inputs, the dimensions of the GEMM.
    """
    without_tensors = functools.partial(_operands_without_tensors, operands_of)

    def applies(condition: Callable[[NodeView, GemmOperands], bool]) -> Callable[[NodeView, str], bool]:
        return lambda n, device: device == "cpu" and (gemm := without_tensors(n)) is not None and condition(n, gemm)

    def call(function: Callable[..., torch.Tensor]) -> Callable[..., Call]:
        def lower_gemm(n: NodeView, *arguments: Any) -> Call:
            gemm = _required(operands_of(n, *arguments))
            return Call(function, gemm.a, gemm.b, gemm.bias, gemm.alpha)

        return lower_gemm

    def lower_convolution(n: NodeView, *arguments: Any) -> Call:
        gemm = _required(operands_of(n, *arguments))
        assert gemm.weight_gradient is not None
        return Call(gemm_by_convolution, *gemm.weight_gradient, gemm.alpha)

    def aten_seconds(n: NodeView, shapes: Shapes, machine: Machine) -> float:
        return _seconds("aten", dims(n, shapes), machine, TORCH_DTYPES[_dtype(n)])

    def large_pages_seconds(n: NodeView, shapes: Shapes, machine: Machine) -> float:
        return _large_pages_seconds(dims(n, shapes), machine, TORCH_DTYPES[_dtype(n)])

    def onednn_seconds(n: NodeView, shapes: Shapes, machine: Machine) -> float:
        is_weight_gradient = _required(without_tensors(n)).weight_gradient is not None
        return _seconds("onednn transposed" if is_weight_gradient else "onednn", dims(n, shapes), machine)

    return (
        padding_kernel(operands_of, dims),
        Kernel(lower=lower, name="aten", seconds=aten_seconds),
        Kernel(
            lower=call(gemm_in_large_pages),
            name="large pages",
            seconds=large_pages_seconds,
            applies=applies(lambda n, gemm: gemm.b_is_matrix and _may_be_large(n)),
        ),
        Kernel(lower=call(onednn_gemm), name="onednn", seconds=onednn_seconds, applies=applies(_onednn_applies)),
        Kernel(
            lower=lower_convolution,
            name="convolution",
            seconds=lambda n, s, machine: _convolution_seconds(dims(n, s), machine),
            applies=applies(_convolution_applies),
        ),
        _compiled(operands_of, dims),
        Kernel(
            lower=call(gemm_in_float32),
            name="float32",
            seconds=lambda n, s, machine: _float32_seconds(dims(n, s), machine),
            applies=applies(lambda n, gemm: _dtype(n) in NARROW),
        ),
    )


def _operands_without_tensors(operands_of: OperandsOf, n: NodeView) -> GemmOperands | None:
    """Return the node's operands with None for each tensor: enough to ask whether a kernel applies."""
    return operands_of(n, *[None] * len(n.definition.inputs))


_WIDE = 8  # the least n / k for which the compiled kernel is tried; the logits of a vocabulary reach it


def _compiled(operands_of: OperandsOf, dims: DimsOf) -> Kernel:
    """Return the candidate of the native kernel. It becomes available at run time, and is chosen only if measured.

    For smaller n it gains little on 2 threads of an AMD EPYC (Zen 3), and its compilation occupies a core.
    """

    def lower(n: NodeView, *arguments: Any) -> Call:
        compiled_gemm.LIBRARY.request()
        gemm = _required(operands_of(n, *arguments))
        return Call(compiled_gemm.gemm, gemm.a, gemm.b, gemm.bias, gemm.alpha)

    def seconds(n: NodeView, shapes: Shapes, machine: Machine) -> float:
        _, k, width, _ = sizes = dims(n, shapes)
        return 1.05 * _seconds("aten", sizes, machine) if width >= _WIDE * k else math.inf

    def applies(n: NodeView, device: str) -> bool:
        if not may_compile(n, device) or _dtype(n) != ir.DataType.FLOAT:
            return False
        gemm = _operands_without_tensors(operands_of, n)
        return gemm is not None and gemm.b_is_matrix and gemm.weight_gradient is None

    return Kernel(
        lower=lower,
        name="compiled",
        seconds=seconds,
        applies=applies,
        library=compiled_gemm.LIBRARY,
    )


def _required(operands: GemmOperands | None) -> GemmOperands:
    assert operands is not None, "this kernel does not apply to the node"
    return operands


def _dtype(n: NodeView) -> ir.DataType:
    first = n.node.inputs[0]
    assert first is not None
    return dtype_of(first)


def _may_be_large(n: NodeView) -> bool:
    """Return whether the result can take 32 MB or more."""
    y = n.node.outputs[0]
    count = numel(y)
    return isinstance(count, str) or count * dtype_of(y).itemsize >= huge_pages.LARGE


def may_use_convolution() -> bool:
    """Return whether weight gradients by oneDNN's convolution are a candidate on this processor.

    Without AVX-512 they take 3.4 times as long as MKL's GEMM, and accumulate all rows sequentially: less exact than the
    one tolerance allows.
    """
    return "avx512" in current_machine().onednn_instructions


def _onednn_applies(n: NodeView, operands: GemmOperands) -> bool:
    return operands.b_is_matrix and onednn_supports(_dtype(n))


def _convolution_applies(n: NodeView, operands: GemmOperands) -> bool:
    return operands.weight_gradient is not None and _onednn_applies(n, operands) and may_use_convolution()


def onednn_supports(dtype: ir.DataType) -> bool:
    """Return whether oneDNN's GEMM supports this dtype and is enabled, in full precision."""
    onednn: Any = torch.backends.mkldnn  # its flags are properties that its type stubs lack
    usable = bool(onednn.is_available() and onednn.enabled and onednn.matmul.fp32_precision in ("none", "ieee"))
    return dtype == ir.DataType.FLOAT and usable
