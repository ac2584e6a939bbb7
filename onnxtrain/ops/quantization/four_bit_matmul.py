"""Products with a weight of 4 bits per element, as QLoRA trains around it: the weight itself is frozen.

    MatMulBnb4(a[..., K], b, absmax) -> y[..., N]                transB=1: a @ W^T, with W[N, K]
    MatMulBnb4(a[..., N], b, absmax) -> y[..., K]                transB=0: a @ W, which is the gradient of the former

W is in b two elements a byte, the first of them in the upper half: the numbers of levels between -1 and 1 (`quant_type`
0: FP4, 1: NF4), which absmax scales for each block of `block_size` elements. Attributes and first inputs are those of
ONNX Runtime. Further inputs hold a scale that is itself quantized ("double quantization"), by blocks of 256:

    scale[i] = absmax_code[absmax_8bit[i]] * absmax[i // 256] + absmax_offset

W stands in memory only while a product is computed: backward makes it again from b.

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
from onnxtrain.ops.definition import REQUIRED, Call, Effects, Gradient, Kernel, NodeView, OpDef, numel
from onnxtrain.ops.registry import define

Tensor = torch.Tensor

TYPES = ("fp4", "nf4")  # by quant_type
# FP4 has a sign, two bits of exponent and one of mantissa; NF4 the quantiles of a normal distribution.
_FP4 = tuple(x / 12 for x in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
LEVELS = ((*_FP4, *(-x for x in _FP4)), _NF4)  # by quant_type
NESTED_BLOCK = 256  # scales that share one scale, where they are quantized themselves
_BNB_BLOCKS = frozenset(2**i for i in range(5, 13))  # block sizes that bitsandbytes' own kernels take
_BNB_TYPES = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def _blocks(n: NodeView) -> int:
    blocks: int = -(-n.N * n.K // n.block_size)
    return blocks


def _types(n: NodeView) -> tuple[TensorType]:
    if n.quant_type not in (0, 1):
        raise GraphError("the type of 4-bit weights", expected="quant_type 0 (FP4) or 1 (NF4)", got=n.quant_type)
    if n.block_size < 16 or n.block_size & (n.block_size - 1):
        raise GraphError("the blocks of 4-bit weights", expected="a power of 2 from 16", got=n.block_size)
    *outer, inner = sizes.dims_of(n.a)
    taken, given = (n.K, n.N) if n.transB else (n.N, n.K)
    if isinstance(inner, int) and inner != taken:
        raise GraphError("MatMulBnb4 multiplies rows of another length", expected=taken, got=inner)
    return (TensorType(dtype_of(n.a), (*outer, given)),)


# Body


def _each(op: Builder, scale: ir.Value, blocks: int, block: int, count: int) -> ir.Value:
    """One scale per block as one per element."""
    spread = op.Expand(reshaped(op, scale, [blocks, 1]), op.sizes([blocks, block]))
    return _first(op, reshaped(op, spread, [blocks * block]), blocks * block, count)


def _first(op: Builder, vector: ir.Value, length: int, count: int) -> ir.Value:
    if length == count:
        return vector
    ends = (int64_vector(op, [number]) for number in (0, count, 0))
    result: ir.Value = op.Slice(vector, *ends)
    return result


def _scale_body(op: Builder, n: NodeView) -> ir.Value:
    """The scale of each block of the weight."""
    if n.absmax_8bit is None:
        absmax: ir.Value = n.absmax
        return absmax
    blocks = _blocks(n)
    coarse = _each(op, n.absmax, -(-blocks // NESTED_BLOCK), NESTED_BLOCK, blocks)
    level = op.Gather(n.absmax_code, op.Cast(reshaped(op, n.absmax_8bit, [blocks]), to=ir.DataType.INT64))
    result: ir.Value = op.Add(op.Mul(level, coarse), reshaped(op, n.absmax_offset, ()))
    return result


def _weight_body(op: Builder, n: NodeView) -> ir.Value:
    """W[N, K] in a's type."""
    count = n.N * n.K
    length = (count + 1) // 2
    packed = reshaped(op, n.b, [length, 1])
    uint8 = ir.DataType.UINT8
    upper = op.BitShift(packed, op.scalar(4, uint8), direction="RIGHT")
    pairs = op.Concat(upper, op.BitwiseAnd(packed, op.scalar(15, uint8)), axis=1)
    level = _first(op, reshaped(op, op.Cast(pairs, to=ir.DataType.INT64), [2 * length]), 2 * length, count)
    unit = op.Gather(op.constant(LEVELS[n.quant_type], ir.DataType.FLOAT), level)
    weight = op.Mul(unit, _each(op, _scale_body(op, n), _blocks(n), n.block_size, count))
    return cast(op, reshaped(op, weight, [n.N, n.K]), dtype_of(n.a))


def _body(op: Builder, n: NodeView) -> ir.Value:
    weight = _weight_body(op, n)
    result: ir.Value = op.MatMul(n.a, op.Transpose(weight, perm=[1, 0]) if n.transB else weight)
    return result


# Kernels


@functools.cache
def _levels(quant_type: int, device: torch.device) -> Tensor:
    return torch.tensor(LEVELS[quant_type], device=device)


def scale_of_blocks(absmax: Tensor, absmax_8bit: Tensor, absmax_code: Tensor, absmax_offset: Tensor) -> Tensor:
    """The scales of a weight whose scales are quantized themselves: float32 [blocks]."""
    level = absmax_code[absmax_8bit.reshape(-1).int()]
    coarse = absmax.repeat_interleave(NESTED_BLOCK)[: level.numel()]
    return level.mul_(coarse).add_(absmax_offset)


def dequantize(b: Tensor, scale: Tensor, shape: tuple[int, int], block: int, quant_type: int) -> Tensor:
    """W[N, K] in float32, from b (uint8, two elements a byte) and the scale of each block (float32)."""
    count = shape[0] * shape[1]
    packed = b.reshape(-1, 1)
    level = torch.cat([packed >> 4, packed & 15], 1).reshape(-1)[:count].int()
    weight = _levels(quant_type, b.device)[level]
    full = count // block * block
    weight[:full].view(-1, block).mul_(scale[: full // block].view(-1, 1))
    weight[full:].mul_(scale[full // block :])
    return weight.view(shape)


def product(a: Tensor, b: Tensor, scales: tuple[Tensor | None, ...], settings: tuple[Any, ...], trans_b: int) -> Tensor:
    """The op on torch tensors. `scales` are absmax and what it is quantized with, `settings` shape, block and type."""
    absmax, *nested = scales
    scale = absmax if nested[0] is None else scale_of_blocks(absmax, *nested)  # type: ignore[arg-type]  # all or none
    weight = dequantize(b, scale, *settings).to(a.dtype)  # type: ignore[arg-type]  # absmax is always there
    return a @ (weight.T if trans_b else weight)


def bnb_product(a: Tensor, b: Tensor, absmax: Tensor, nested: Any, settings: tuple[Any, ...]) -> Tensor:
    """A @ W^T by the kernel of bitsandbytes, which need not make all of W on a GPU."""
    (shape, block, quant_type), packed = settings, b.view(-1, 1)
    found: Tensor = torch.ops.bitsandbytes.gemm_4bit.default(
        a, packed, shape, absmax, block, TYPES[quant_type], None, *nested
    )
    return found


def bnb_product_back(a: Tensor, b: Tensor, absmax: Tensor, nested: Any, settings: tuple[Any, ...]) -> Tensor:
    """A @ W, W being made by the kernel of bitsandbytes."""
    shape, block, quant_type = settings
    if nested[0] is not None:
        levels, code, offset = nested
        dequantize_scale = torch.ops.bitsandbytes.dequantize_blockwise.default
        absmax = dequantize_scale(levels, absmax, code, NESTED_BLOCK, torch.float32).add_(offset)
    make = torch.ops.bitsandbytes.dequantize_4bit.default
    return torch.matmul(a, make(b.view(-1, 1), absmax, block, TYPES[quant_type], shape, a.dtype))


def _settings(n: NodeView) -> tuple[Any, ...]:
    return (n.N, n.K), n.block_size, n.quant_type


def _lower(n: NodeView, a: Any, b: Any, *scales: Any) -> Call:
    return Call(product, a, b, scales, _settings(n), n.transB)


def _lower_bnb(n: NodeView, a: Any, b: Any, absmax: Any, *nested: Any) -> Call:
    return Call(bnb_product if n.transB else bnb_product_back, a, b, absmax, nested, _settings(n))


def _bnb_applies(n: NodeView, device: str) -> bool:
    """Bitsandbytes is imported, as it is wherever a weight of its kind is, and takes this.

    Where blocks go over the ends of rows, its kernel for CPUs (0.50) gives wrong numbers.
    """
    known = hasattr(torch.ops.bitsandbytes, "gemm_4bit") and hasattr(torch.ops.bitsandbytes, "dequantize_4bit")
    return known and dtype_of(n.a) in _BNB_TYPES and n.block_size in _BNB_BLOCKS and n.K % n.block_size == 0


# Definition


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    weight = list(n.node.inputs)[1:]
    settings = {name: getattr(n, name) for name in ("K", "N", "block_size", "quant_type", "training_mode")}
    return [op.ms.MatMulBnb4(dy, *weight, **settings, transB=int(not n.transB)), *[None] * len(weight)]


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
    """`bitsandbytes::gemm_4bit`."""
    quantized = [*nested, *named.values()]
    if dtype_of(b) != ir.DataType.UINT8:
        return NotImplemented
    packed = reshaped(op, b, [(shape[0] * shape[1] + 1) // 2])
    y = op.ms.MatMulBnb4(
        a,
        packed,
        absmax,
        *(quantized if any(v is not None for v in quantized) else ()),
        N=shape[0],
        K=shape[1],
        block_size=block,
        quant_type=TYPES.index(str(quant_type)),
        training_mode=1,
    )
    return y if bias is None else op.Add(y, bias)


def _native(n: NodeView) -> bool:
    """Onnxruntime's kernel ignores transB=0 on a CPU, and gives wrong numbers."""
    return bool(n.transB) and n.absmax_8bit is None and dtype_of(n.a) == ir.DataType.FLOAT and rank_of(n.b) == 1


def _flops(n: NodeView) -> sizes.Size:
    rows = sizes.floor_divide(numel(n.node.outputs[0]), n.N if n.transB else n.K)
    return sizes.add(sizes.multiply(2, rows, n.N, n.K), 4 * n.N * n.K)


def _axes(n: NodeView) -> str:
    rest = ", ".join("-" if v is None or not rank_of(v) else f"[{'stuv'[i]}]" for i, v in enumerate(n.node.inputs[2:]))
    b = "[b] 1" if rank_of(n.b) == 2 else "[b]"
    return f"... [i], {b}, {rest} -> ... o"


MATMUL_BNB4 = define(
    OpDef(
        domain=MICROSOFT,
        name="MatMulBnb4",
        inputs=("a", "b", "absmax", "absmax_8bit?", "absmax_code?", "absmax_offset?"),
        outputs=("y",),
        attributes={
            "K": REQUIRED,
            "N": REQUIRED,
            "block_size": REQUIRED,
            "quant_type": REQUIRED,
            "training_mode": 0,
            "transB": 1,
        },
        since_version=1,
        from_torch={"bitsandbytes.gemm_4bit.default": _capture},
        shapes=_types,
        body=_body,
        ort_compatible=_native,
        gradient=(Gradient(_gradient, reads=("b", "absmax", "absmax_8bit", "absmax_code", "absmax_offset")),),
        nondiff_inputs=frozenset({"b", "absmax", "absmax_8bit", "absmax_code", "absmax_offset"}),
        kernels=(Kernel(lower=_lower_bnb, applies=_bnb_applies), Kernel(lower=_lower)),
        axes=_axes,
        effects=Effects.NONE,
        aliases={},
        flops=_flops,
        host_eval=None,
    )
)
