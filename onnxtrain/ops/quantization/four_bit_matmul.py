"""Matmul with a frozen 4-bit weight, as in QLoRA.

    MatMulBnb4(a[..., K], b, absmax) -> y[..., N]                transB=1: a @ W^T, with W[N, K]
    MatMulBnb4(a[..., N], b, absmax) -> y[..., K]                transB=0: a @ W, the gradient of the former

b packs two elements of W into a byte, the first in the upper half. Each is the index of a level between -1 and 1
(`quant_type` 0: FP4, 1: NF4); absmax scales each block of `block_size` elements. Attributes and the first inputs are
those of ONNX Runtime. The other inputs hold scales that are themselves quantized ("double quantization") in blocks of
256:

    scale[i] = absmax_code[absmax_8bit[i]] * absmax[i // 256] + absmax_offset

W is in memory only during a matmul: backward dequantizes it again.

Source: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314. The layout is that of bitsandbytes.
"""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import cast, int64_vector, reshaped
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import REQUIRED, Call, Gradient, Kernel, NodeView, numel
from onnxtrain.ops.interfaces.stock_kernels import STOCK_KERNELS

Tensor = torch.Tensor

TYPES = ("fp4", "nf4")  # by quant_type
# FP4 has a sign, two exponent bits and one mantissa bit; NF4 has quantiles of the normal distribution.
_FP4 = tuple(x / 12 for x in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
LEVELS = ((*_FP4, *(-x for x in _FP4)), _NF4)  # by quant_type
NESTED_BLOCK = 256  # quantized scales that share one scale
_BNB_BLOCKS = frozenset(2**i for i in range(5, 13))  # block sizes that the kernels of bitsandbytes support
_BNB_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def _blocks(n: NodeView) -> int:
    return -(-n.N * n.K // n.block_size)


def _types(n: NodeView) -> tuple[TensorType]:
    if n.quant_type not in (0, 1):
        raise GraphError("MatMulBnb4: unknown quant_type", expected="0 (FP4) or 1 (NF4)", got=n.quant_type)
    if n.block_size < 16 or n.block_size & (n.block_size - 1):
        raise GraphError("MatMulBnb4: unsupported block_size", expected="a power of 2, at least 16", got=n.block_size)
    *outer, inner = sizes.dims_of(n.a)
    input_size, output_size = (n.K, n.N) if n.transB else (n.N, n.K)
    if isinstance(inner, int) and inner != input_size:
        raise GraphError(
            "MatMulBnb4: the last dimension of a does not match the weight",
            expected=f"{input_size}, of N={n.N}, K={n.K}, transB={n.transB}",
            got=inner,
        )
    return (TensorType(dtype_of(n.a), (*outer, output_size)),)


# Body


def _scale_per_element(op: Builder, scale: ir.Value, blocks: int, block: int, count: int) -> ir.Value:
    """Repeat the scale of each block for its elements, `count` in all."""
    repeated = op.Expand(reshaped(op, scale, [blocks, 1]), op.sizes([blocks, block]))
    return _head(op, reshaped(op, repeated, [blocks * block]), blocks * block, count)


def _head(op: Builder, vector: ir.Value, length: int, count: int) -> ir.Value:
    """Return the first `count` elements of a vector."""
    if length == count:
        return vector
    start, end, axis = (int64_vector(op, [bound]) for bound in (0, count, 0))
    return op.Slice(vector, start, end, axis)


def _scale_body(op: Builder, n: NodeView) -> ir.Value:
    """Return the scale of each block of the weight."""
    if n.absmax_8bit is None:
        return n.absmax
    blocks = _blocks(n)
    coarse = _scale_per_element(op, n.absmax, -(-blocks // NESTED_BLOCK), NESTED_BLOCK, blocks)
    level = op.Gather(n.absmax_code, op.Cast(reshaped(op, n.absmax_8bit, [blocks]), to=ir.DataType.INT64))
    return op.Add(op.Mul(level, coarse), reshaped(op, n.absmax_offset, ()))


def _weight_body(op: Builder, n: NodeView) -> ir.Value:
    """Dequantize W[N, K] to a's type."""
    count = n.N * n.K
    length = (count + 1) // 2
    packed = reshaped(op, n.b, [length, 1])
    uint8 = ir.DataType.UINT8
    upper = op.BitShift(packed, op.scalar(4, uint8), direction="RIGHT")
    pairs = op.Concat(upper, op.BitwiseAnd(packed, op.scalar(15, uint8)), axis=1)
    indices = _head(op, reshaped(op, op.Cast(pairs, to=ir.DataType.INT64), [2 * length]), 2 * length, count)
    level = op.Gather(op.constant(LEVELS[n.quant_type], ir.DataType.FLOAT), indices)
    weight = op.Mul(level, _scale_per_element(op, _scale_body(op, n), _blocks(n), n.block_size, count))
    return cast(op, reshaped(op, weight, [n.N, n.K]), dtype_of(n.a))


def _body(op: Builder, n: NodeView) -> ir.Value:
    weight = _weight_body(op, n)
    return op.MatMul(n.a, op.Transpose(weight, perm=[1, 0]) if n.transB else weight)


# Kernels


@functools.cache
def _levels(quant_type: int, device: torch.device) -> Tensor:
    return torch.tensor(LEVELS[quant_type], device=device)


def dequantize_scale(absmax: Tensor, absmax_8bit: Tensor, absmax_code: Tensor, absmax_offset: Tensor) -> Tensor:
    """Dequantize the scales of a weight: float32 [blocks]."""
    level = absmax_code[absmax_8bit.reshape(-1).int()]
    coarse = absmax.repeat_interleave(NESTED_BLOCK)[: level.numel()]
    return level.mul_(coarse).add_(absmax_offset)


def dequantize(b: Tensor, scale: Tensor, shape: tuple[int, int], block: int, quant_type: int) -> Tensor:
    """Return W[N, K] in float32, from b (uint8, two elements in a byte) and the scale of each block (float32)."""
    count = shape[0] * shape[1]
    packed = b.reshape(-1, 1)
    indices = torch.cat([packed >> 4, packed & 15], 1).reshape(-1)[:count].int()
    weight = _levels(quant_type, b.device)[indices]
    full_blocks = count // block
    weight[: full_blocks * block].view(-1, block).mul_(scale[:full_blocks].view(-1, 1))
    weight[full_blocks * block :].mul_(scale[full_blocks:])
    return weight.view(shape)


def dequantize_and_matmul(
    a: Tensor, b: Tensor, scales: tuple[Tensor | None, ...], layout: tuple[Any, ...], trans_b: int
) -> Tensor:
    """Compute MatMulBnb4 by PyTorch's ops.

    Args:
        a: as in the op.
        b: as in the op.
        scales: the inputs from absmax on; all but absmax may be None.
        layout: the shape of W, the block size and quant_type.
        trans_b: the attribute transB.
    """
    absmax, *nested = scales
    scale = absmax if nested[0] is None else dequantize_scale(absmax, *nested)  # type: ignore[arg-type]  # all or none
    weight = dequantize(b, scale, *layout).to(a.dtype)  # type: ignore[arg-type]  # absmax is never None
    return a @ (weight.T if trans_b else weight)


def bnb_matmul_transposed(a: Tensor, b: Tensor, absmax: Tensor, nested: Any, layout: tuple[Any, ...]) -> Tensor:
    """Return a @ W^T by the kernel of bitsandbytes, which on a GPU does not dequantize all of W at once."""
    (shape, block, quant_type), packed = layout, b.view(-1, 1)
    return torch.ops.bitsandbytes.gemm_4bit.default(a, packed, shape, absmax, block, TYPES[quant_type], None, *nested)


def bnb_matmul(a: Tensor, b: Tensor, absmax: Tensor, nested: Any, layout: tuple[Any, ...]) -> Tensor:
    """Return a @ W, with W dequantized by the kernel of bitsandbytes."""
    shape, block, quant_type = layout
    if nested[0] is not None:
        levels, code, offset = nested
        dequantize_blockwise = torch.ops.bitsandbytes.dequantize_blockwise.default
        absmax = dequantize_blockwise(levels, absmax, code, NESTED_BLOCK, torch.float32).add_(offset)
    dequantize_4bit = torch.ops.bitsandbytes.dequantize_4bit.default
    return torch.matmul(a, dequantize_4bit(b.view(-1, 1), absmax, block, TYPES[quant_type], shape, a.dtype))


def _weight_layout(n: NodeView) -> tuple[Any, ...]:
    return (n.N, n.K), n.block_size, n.quant_type


def _lower(n: NodeView, a: Any, b: Any, *scales: Any) -> Call:
    return Call(dequantize_and_matmul, a, b, scales, _weight_layout(n), n.transB)


def _lower_bnb(n: NodeView, a: Any, b: Any, absmax: Any, *nested: Any) -> Call:
    return Call(bnb_matmul_transposed if n.transB else bnb_matmul, a, b, absmax, nested, _weight_layout(n))


def _bnb_applies(n: NodeView, device: str) -> bool:
    """Return whether bitsandbytes is imported, as it is by a model with such weights, and supports the node.

    Its CPU kernel (0.50) computes wrong values if a block spans two rows.
    """
    is_imported = hasattr(torch.ops.bitsandbytes, "gemm_4bit") and hasattr(torch.ops.bitsandbytes, "dequantize_4bit")
    return is_imported and dtype_of(n.a) in _BNB_TYPES and n.block_size in _BNB_BLOCKS and n.K % n.block_size == 0


# Definition


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    weight_inputs = list(n.node.inputs)[1:]
    attributes = {name: getattr(n, name) for name in ("K", "N", "block_size", "quant_type", "training_mode")}
    return [op.ms.MatMulBnb4(dy, *weight_inputs, **attributes, transB=int(not n.transB)), *[None] * len(weight_inputs)]


def _capture(
    op: Builder,
    a: ir.Value,
    b: ir.Value,
    shape: list[int],
    absmax: ir.Value,
    block: int,
    quant_type: str,
    bias: ir.Value | None = None,
    *nested: ir.Value | None,
    **named: ir.Value | None,
) -> Any:
    """Capture `bitsandbytes::gemm_4bit`."""
    nested_inputs = [*nested, *named.values()]
    if dtype_of(b) != ir.DataType.UINT8:
        return NotImplemented
    packed = reshaped(op, b, [(shape[0] * shape[1] + 1) // 2])
    y = op.ms.MatMulBnb4(
        a,
        packed,
        absmax,
        *(nested_inputs if any(v is not None for v in nested_inputs) else ()),
        N=shape[0],
        K=shape[1],
        block_size=block,
        quant_type=TYPES.index(str(quant_type)),
        training_mode=1,
    )
    return y if bias is None else op.Add(y, bias)


def _has_stock_kernel(n: NodeView) -> bool:
    """Return whether stock onnxruntime computes the same; its CPU kernel ignores transB=0."""
    return bool(n.transB) and n.absmax_8bit is None and dtype_of(n.a) == ir.DataType.FLOAT and rank_of(n.b) == 1


def _flops(n: NodeView) -> sizes.Size:
    rows = sizes.floor_divide(numel(n.node.outputs[0]), n.N if n.transB else n.K)
    return sizes.add(sizes.multiply(2, rows, n.N, n.K), 4 * n.N * n.K)


def _axes(n: NodeView) -> str:
    scales = ["-" if v is None or not rank_of(v) else f"[{'stuv'[i]}]" for i, v in enumerate(n.node.inputs[2:])]
    b = "[b] 1" if rank_of(n.b) == 2 else "[b]"
    return f"... [i], {b}, {', '.join(scales)} -> ... o"


MATMUL_BNB4 = define_pure(
    MICROSOFT,
    "MatMulBnb4",
    ("a", "b", "absmax", "absmax_8bit?", "absmax_code?", "absmax_offset?"),
    ("y",),
    attributes={
        "K": REQUIRED,
        "N": REQUIRED,
        "block_size": REQUIRED,
        "quant_type": REQUIRED,
        "training_mode": 0,
        "transB": 1,
    },
    from_torch={"bitsandbytes.gemm_4bit.default": _capture},
    shapes=_types,
    body=_body,
    gradient=(Gradient(_gradient, reads=("b", "absmax", "absmax_8bit", "absmax_code", "absmax_offset")),),
    nondiff_inputs=frozenset({"b", "absmax", "absmax_8bit", "absmax_code", "absmax_offset"}),
    kernels=(
        Kernel(lower=_lower_bnb, applies=_bnb_applies),
        Kernel(lower=_lower),
    ),
    axes=_axes,
    flops=_flops,
)
STOCK_KERNELS.register(MATMUL_BNB4, _has_stock_kernel)
