"""The libraries that can compute a matrix product, and what each is expected to take.

    aten           what PyTorch itself would call: MKL for float32 and float64, oneDNN for narrower types
    large pages    the same, written to large pages of fresh memory: for results of 32 MB and more
    onednn         oneDNN's inner product, which takes a transposed right operand as it lies
    convolution    a weight gradient dyᵀ @ x as the backward of a 1×1 convolution: nothing is transposed in memory
    compiled       a kernel of our own (`compiled_product`): for outputs much wider than the product is deep
    float32        narrow operands widened before the product and its result rounded: as exact, and faster where the
                   processor has no instructions for the narrow type

The bias gradient that the convolution's backward computes besides is not used: at 2048 rows its error is 12 times
that of a sum, more than the one tolerance allows.
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
from onnxtrain.ops.constructors import TORCH_DTYPES
from onnxtrain.ops.cost_model import Shapes, expected_seconds, widening_seconds
from onnxtrain.ops.definition import Call, Kernel, NodeView, numel
from onnxtrain.ops.matmul import compiled_product
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.system.machine import Machine, current_machine
from onnxtrain.torch_compat import aten_kernels

_NARROW = frozenset({ir.DataType.BFLOAT16, ir.DataType.FLOAT16})


@dataclass(frozen=True)
class Product:
    """A node's product y = alpha * a @ b + bias, as arguments of a Call.

    Attributes:
        a: [..., m, k] and b: [k, n], or [..., k, n] where the node multiplies batches: views where they are transposed.
        bias: [n], or None.
        of_matrix: whether b is a matrix.
        transposed: for a weight gradient aᵀ @ b of two matrices, its operands as they lie; else None.
    """

    a: Any
    b: Any
    bias: Any = None
    alpha: float = 1.0
    of_matrix: bool = True
    transposed: tuple[Any, Any] | None = None


# m, k, n of the product, with the batch in m where b is a matrix; and how many such products there are.
Dims = tuple[int, int, int, int]


def product_dims(a: tuple[int, ...], b: tuple[int, ...]) -> Dims:
    """Of a[..., m, k] @ b[..., k, n], in the shapes as they are multiplied."""
    k, n = (b[-2], b[-1]) if len(b) > 1 else (b[0], 1)
    if len(b) <= 2:
        return math.prod(a[:-1]), k, n, 1
    batch = math.prod(torch.broadcast_shapes(a[:-2], b[:-2]))
    return a[-2] if len(a) > 1 else 1, k, n, batch


# Kernels


def product_in_large_pages(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, alpha: float) -> torch.Tensor:
    """Alpha * a[..., m, k] @ b[k, n] + bias[n]."""
    y = huge_pages.empty((*a.shape[:-1], b.size(1)), a)
    rows, into = a.flatten(0, -2), y.flatten(0, -2)
    if bias is None:
        torch.mm(rows, b, out=into)
    else:
        torch.addmm(bias, rows, b, out=into)
    return y if alpha == 1 else y.mul_(alpha)


def onednn_product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, alpha: float) -> torch.Tensor:
    """Alpha * a[..., m, k] @ b[k, n] + bias[n] in oneDNN, which has no products over k = 0."""
    if b.size(0) == 0:
        empty = torch.matmul(a, b)
        return empty if bias is None else empty.add_(bias)
    y = aten_kernels.onednn_linear(a, b.t(), bias, "none", [], "")
    return y if alpha == 1 else y.mul_(alpha)


def in_float32(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, alpha: float) -> torch.Tensor:
    """Alpha * a @ b + bias, computed in float32 and rounded to the type of `a`."""
    y = torch.matmul(a.float(), b.float())
    if alpha != 1:
        y.mul_(alpha)
    if bias is not None:
        y.add_(bias)
    return y.to(a.dtype)


def _picture_height(rows: int) -> int:
    """Rows are dealt into pictures of this height, for which the convolution's kernels are written."""
    return next((height for height in (128, 64, 32, 16) if rows % height == 0), 0)


def product_by_convolution(dy: torch.Tensor, x: torch.Tensor, alpha: float) -> torch.Tensor:
    """Alpha * dyᵀ @ x of dy[t, n] and x[t, k], where t is a multiple of 16; a plain product elsewhere."""
    rows, n = dy.shape
    k = x.size(1)
    height = _picture_height(rows)
    if height == 0 or dy.numel() == 0 or x.numel() == 0:
        y = torch.mm(dy.t(), x)
    else:
        pictures = [
            v.contiguous().view(rows // height, height, 1, v.size(1)).permute(0, 3, 1, 2) for v in (dy, x)
        ]  # in channels-last order
        weight = x.new_empty(()).expand(n, k, 1, 1)  # only its shape is read
        _, y, _ = torch.ops.aten.convolution_backward(
            *pictures, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
        )
        y = y.view(n, k)
    return y if alpha == 1 else y.mul_(alpha)


# What they are expected to take


def _seconds(way: str, dims: Dims, machine: Machine, dtype: torch.dtype = torch.float32) -> float:
    return expected_seconds(way, 2.0 * math.prod(dims), machine, dtype)


def _large_pages_seconds(dims: Dims, machine: Machine, dtype: torch.dtype) -> float:
    """A little less than small pages take, and not even tried where the allocator keeps such memory."""
    m, _, n, _ = dims
    gains = m * n * dtype.itemsize >= huge_pages.LARGE
    return 0.95 * _seconds("aten", dims, machine, dtype) if gains else math.inf


def _convolution_seconds(dims: Dims, machine: Machine) -> float:
    return _seconds("convolution", dims, machine) if _picture_height(dims[1]) else math.inf


def _float32_seconds(dims: Dims, machine: Machine) -> float:
    m, k, n, batch = dims
    return _seconds("aten", dims, machine) + widening_seconds(batch * (m * k + k * n + m * n), machine)


DimsOf = Callable[[NodeView, Shapes], Dims]
ProductOf = Callable[..., Product | None]


def product_kernels(lower: Callable[..., Call], product: ProductOf, dims: DimsOf) -> tuple[Kernel, ...]:
    """All candidates for an op that is a matrix product.

    Args:
        lower: what PyTorch itself would call, from the node and the arguments.
        product: from the node and the arguments, the product that the other libraries compute for it; None where none
            of them can.
        dims: from the node and the shapes of its inputs, the sizes of the product.
    """
    of = functools.partial(_described, product)

    def applies(kind: Callable[[NodeView, Product], bool]) -> Callable[[NodeView, str], bool]:
        return lambda n, device: device == "cpu" and (found := of(n)) is not None and kind(n, found)

    def call(function: Callable[..., torch.Tensor]) -> Callable[..., Call]:
        def lower_it(n: NodeView, *arguments: Any) -> Call:
            found = _sure(product(n, *arguments))
            return Call(function, found.a, found.b, found.bias, found.alpha)

        return lower_it

    def lower_convolution(n: NodeView, *arguments: Any) -> Call:
        found = _sure(product(n, *arguments))
        assert found.transposed is not None
        return Call(product_by_convolution, *found.transposed, found.alpha)

    def aten_seconds(n: NodeView, shapes: Shapes, machine: Machine) -> float:
        return _seconds("aten", dims(n, shapes), machine, TORCH_DTYPES[_dtype(n)])

    def large_pages_seconds(n: NodeView, shapes: Shapes, machine: Machine) -> float:
        return _large_pages_seconds(dims(n, shapes), machine, TORCH_DTYPES[_dtype(n)])

    def onednn_seconds(n: NodeView, shapes: Shapes, machine: Machine) -> float:
        way = "onednn transposed" if _sure(of(n)).transposed else "onednn"
        return _seconds(way, dims(n, shapes), machine)

    return (
        Kernel(lower=lower, name="aten", seconds=aten_seconds),
        Kernel(
            lower=call(product_in_large_pages),
            name="large pages",
            seconds=large_pages_seconds,
            applies=applies(lambda n, found: found.of_matrix and _may_be_large(n)),
        ),
        Kernel(lower=call(onednn_product), name="onednn", seconds=onednn_seconds, applies=applies(_in_onednn)),
        Kernel(
            lower=lower_convolution,
            name="convolution",
            seconds=lambda n, s, machine: _convolution_seconds(dims(n, s), machine),
            applies=applies(lambda n, found: found.transposed is not None and _in_onednn(n, found) and convolves()),
        ),
        _compiled(product, dims),
        Kernel(
            lower=call(in_float32),
            name="float32",
            seconds=lambda n, s, machine: _float32_seconds(dims(n, s), machine),
            applies=applies(lambda n, found: _dtype(n) in _NARROW),
        ),
    )


def _described(product: ProductOf, n: NodeView) -> Product | None:
    """What the other libraries compute, without tensors."""
    return product(n, *[None] * len(n.definition.inputs))


_WIDE = 8  # times as many outputs as the product is deep, as scores of a vocabulary are


def _compiled(product: ProductOf, dims: DimsOf) -> Kernel:
    """The candidate of our own kernel, which comes in mid-run: not expected to be faster before it is measured.

    Where outputs are fewer it gains little on 2 threads of an AMD EPYC (Zen 3), and its compile takes a processor.
    """

    def lower(n: NodeView, *arguments: Any) -> Call:
        compiled_product.LIBRARY.request()
        found = _sure(product(n, *arguments))
        return Call(compiled_product.product, found.a, found.b, found.bias, found.alpha)

    def seconds(n: NodeView, shapes: Shapes, machine: Machine) -> float:
        _, k, width, _ = sizes = dims(n, shapes)
        return 1.05 * _seconds("aten", sizes, machine) if width >= _WIDE * k else math.inf

    def applies(n: NodeView, device: str) -> bool:
        if not may_compile(n, device) or _dtype(n) != ir.DataType.FLOAT:
            return False
        found = _described(product, n)
        return found is not None and found.of_matrix and found.transposed is None

    return Kernel(
        lower=lower,
        name="compiled",
        seconds=seconds,
        applies=applies,
        is_ready=compiled_product.LIBRARY.is_there,
        prepare=compiled_product.LIBRARY.request,
    )


def _sure(product: Product | None) -> Product:
    assert product is not None, "this kernel does not apply to the node"
    return product


def _dtype(n: NodeView) -> ir.DataType:
    first = n.node.inputs[0]
    assert first is not None
    return dtype_of(first)


def _may_be_large(n: NodeView) -> bool:
    """Whether the result takes 32 MB or more at some sizes."""
    y = n.node.outputs[0]
    count = numel(y)
    return isinstance(count, str) or count * dtype_of(y).itemsize >= huge_pages.LARGE


def convolves() -> bool:
    """Whether weight gradients by oneDNN's convolution are a candidate on this processor.

    Without AVX-512 they take 3.4 times as long as MKL's product and add all rows one after the other: less exact than
    the one tolerance allows.
    """
    return "avx512" in current_machine().onednn_instructions


def _in_onednn(n: NodeView, product: Product) -> bool:
    return product.of_matrix and in_onednn(_dtype(n))


def in_onednn(dtype: ir.DataType) -> bool:
    """Whether oneDNN multiplies matrices of this type, and in full precision, as the user wants it."""
    onednn: Any = torch.backends.mkldnn  # has its flags as properties, of which its types know nothing
    usable = bool(onednn.is_available() and onednn.enabled and onednn.matmul.fp32_precision in ("none", "ieee"))
    return dtype == ir.DataType.FLOAT and usable
