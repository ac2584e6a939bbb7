"""Dropout whose mask is packed, 32 elements in a word; and dropout of a sum.

    BitmaskDropout(x, ratio, training_mode) -> y, mask       mask: uint32 [ceil(elements / 32)], bit i of word w is
                                                             element 32 w + i; kept where it is 1
    BitmaskDropoutGrad(dy, mask, ratio, training_mode) -> dx
    BiasDropout(x, bias, residual, ratio, training_mode) -> y, mask           residual + dropout(x + bias)
    BitmaskBiasDropout                                                        the same, with a packed mask

A packed mask is an eighth of Dropout's. How a node draws stands in `randomness.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import MICROSOFT, TensorType, dtype_of, type_of
from onnxtrain.ops.body_parts import int64_vector, reshaped
from onnxtrain.ops.constructors import (
    always,
    broadcast_axes,
    define_by_body,
    define_fused,
    elementwise_flops,
    never,
    no_axes,
)
from onnxtrain.ops.definition import Call, Effects, Gradient, Kernel, NodeView, OpDef, Replay, numel
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.random.dropout import (
    DRAWS,
    draws_fast,
    dropout,
    dropout_backward_of_any_ratio,
    dropout_of_any_ratio,
    fast_dropout,
    masked,
    ratio_is_read,
    ratio_of,
    scale_of,
    trains,
)
from onnxtrain.ops.registry import define

Tensor = torch.Tensor
INT64 = ir.DataType.INT64
_WORD = 32


def _words(n: NodeView, value: ir.Value) -> TensorType:
    return TensorType(ir.DataType.UINT32, (sizes.floor_divide(sizes.add(numel(value), _WORD - 1), _WORD),))


# Packing. PyTorch has hardly an op for uint32: words are seen as the bytes that they are made of, lowest first. Eight
# truth values are the bytes of an int64: a product brings them together in its highest byte, a table takes them apart.

_TOGETHER = sum(1 << (56 - 7 * i) for i in range(8))


@functools.cache
def _apart(device: torch.device) -> Tensor:
    """For each byte its bits as the bytes of an int64: int64 [256]."""
    bits = torch.arange(256, device=device)[:, None].bitwise_right_shift(torch.arange(8, device=device))
    return bits.bitwise_and_(1).to(torch.uint8).view(torch.int64).view(-1)


def packed(mask: Tensor) -> Tensor:
    """Bits for truth values: uint32 [ceil(elements / 32)]. Writes over them."""
    count, flat = mask.numel(), mask.reshape(-1).view(torch.uint8)
    if count % _WORD:
        flat = torch.cat((flat, flat.new_zeros(-count % _WORD)))
    return (
        flat.view(torch.int64)
        .mul_(_TOGETHER)
        .view(torch.uint8)[7::8]
        .clone(memory_format=torch.contiguous_format)
        .view(torch.uint32)
    )


def unpacked(words: Tensor, shape: Sequence[int]) -> Tensor:
    """Truth values for bits."""
    found = _apart(words.device).index_select(0, words.view(torch.uint8).to(torch.int32))
    return found.view(torch.bool)[: torch.Size(shape).numel()].view(shape)


def _powers(op: Builder) -> ir.Value:
    return op.constant([2**i for i in range(_WORD)], INT64)


def _packed(op: Builder, n: NodeView, mask: ir.Value) -> ir.Value:
    ((_, (words,)),) = (_words(n, n.x),)
    count = numel(n.x)
    bits = reshaped(op, op.Cast(mask, to=INT64), [count])
    missing = sizes.subtract(sizes.multiply(words, _WORD), count)
    padded = TensorType(INT64, (sizes.multiply(words, _WORD),))
    bits = op.node("", "Pad", (bits, op.sizes([0, missing])), {}, types=[padded]).outputs[0]
    weighted = op.Mul(reshaped(op, bits, [words, _WORD]), _powers(op))
    result: ir.Value = op.Cast(op.ReduceSum(weighted, int64_vector(op, [1]), keepdims=0), to=ir.DataType.UINT32)
    return result


def _unpacked(op: Builder, n: NodeView) -> ir.Value:
    (words,), count = sizes.dims_of(n.mask), numel(n.dy)
    columns = op.Div(reshaped(op, op.Cast(n.mask, to=INT64), [words, 1]), _powers(op))
    bits = reshaped(op, op.Mod(columns, op.scalar(2, INT64)), [sizes.multiply(words, _WORD)])
    cut = (bits, op.sizes([0]), op.sizes([count]), op.sizes([0]))
    bits = op.node("", "Slice", cut, {}, types=[TensorType(INT64, (count,))]).outputs[0]
    return op.Cast(reshaped(op, bits, sizes.dims_of(n.dy)), to=ir.DataType.BOOL)  # type: ignore[no-any-return]


# BitmaskDropout


def packed_dropout(x: Tensor, keep: float, scale: float) -> tuple[Tensor, Tensor]:
    y, mask = dropout(x, keep, scale)
    return y, packed(mask)


def fast_packed_dropout(x: Tensor, dropped: int, scale: float) -> tuple[Tensor, Tensor]:
    y, mask = fast_dropout(x, dropped, scale)
    return y, packed(mask)


def packed_dropout_of_any_ratio(x: Tensor, ratio: Any, training: Any) -> tuple[Tensor, Tensor]:
    y, mask = dropout_of_any_ratio(x, ratio, training)
    return y, packed(mask)


def _bitmask_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    y, mask = op.Dropout(n.x, n.ratio, n.training_mode, seed=n.seed)
    return y, _packed(op, n, mask)


def _bitmask_gradient(op: Builder, n: NodeView, dy: ir.Value | None, _: None) -> list[ir.Value | None]:
    return [None if dy is None else _masked_nodes(op, n, dy, n.mask), None, None][: len(n.node.inputs)]


def _masked_nodes(op: Builder, n: NodeView, x: ir.Value, mask: ir.Value) -> ir.Value:
    """What BitmaskDropout does with x and what it drew: BitmaskDropoutGrad computes it in the same way."""
    ratio = op.scalar(ratio_of(n), ir.DataType.DOUBLE) if trains(n) else n.ratio
    return op.ms.BitmaskDropoutGrad(x, mask, ratio, n.training_mode)  # type: ignore[no-any-return]


def _scale(n: NodeView, value: ir.Value) -> float:
    return scale_of(ratio_of(n), TORCH_DTYPES[dtype_of(value)])


define(
    OpDef(
        domain=MICROSOFT,
        name="BitmaskDropout",
        inputs=("x", "ratio?", "training_mode?"),
        outputs=("y", "mask"),
        attributes={"seed": None},
        since_version=1,
        from_torch={},
        shapes=lambda n: (type_of(n.x), _words(n, n.x)),
        body=_bitmask_body,
        ort_compatible=never,
        gradient=(Gradient(_bitmask_gradient, reads=("mask",)),),
        nondiff_inputs=frozenset({"ratio", "training_mode"}),
        kernels=(
            Kernel(
                lower=lambda n, x, *_: Call(fast_packed_dropout, x, round(ratio_of(n) * DRAWS), _scale(n, n.x)),
                applies=lambda n, device: draws_fast(n),
            ),
            Kernel(
                lower=lambda n, x, *_: Call(packed_dropout, x, 1 - ratio_of(n), _scale(n, n.x)),
                applies=lambda n, device: trains(n),
                workspace_bytes=lambda n: numel(n.x),  # a mask of bytes
            ),
            Kernel(
                lower=lambda n, *arguments: Call(packed_dropout_of_any_ratio, *arguments),
                accepts_scalars=True,
                synchronizes=ratio_is_read,
            ),
        ),
        axes=lambda n: NO_AXES,  # a word belongs to many rows
        effects=Effects.RANDOM,
        aliases={},
        flops=elementwise_flops,
        host_eval=None,
        replay=Replay(("mask",), lambda op, n, mask: _masked_nodes(op, n, n.x, mask)),
    )
)


def packed_masked(dy: Tensor, mask: Tensor, scale: float) -> Tensor:
    return masked(dy, unpacked(mask, dy.shape), scale)


def packed_dropout_backward(dy: Tensor, mask: Tensor, ratio: Any, training: Any) -> Tensor:
    return dropout_backward_of_any_ratio(dy, unpacked(mask, dy.shape), ratio, training)


define_fused(
    MICROSOFT,
    "BitmaskDropoutGrad",
    ("dy", "mask", "ratio?", "training_mode?"),
    ("dx",),
    shapes=lambda n: (type_of(n.dy),),
    body=lambda op, n: op.ms.DropoutGrad(n.dy, _unpacked(op, n), n.ratio, n.training_mode),
    lower=lambda n, *arguments: Call(packed_dropout_backward, *arguments),
    synchronizes=ratio_is_read,
    kernels=(
        Kernel(
            lower=lambda n, dy, mask, *_: Call(packed_masked, dy, mask, _scale(n, n.dy)),
            applies=lambda n, device: trains(n),
            workspace_bytes=lambda n: numel(n.dy),  # a mask of bytes
        ),
    ),
    axes=no_axes,
    flops=lambda n: sizes.multiply(3, numel(n.dy)),
)


# BiasDropout, BitmaskBiasDropout


def _bias_body(name: str) -> Any:
    def body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
        domain = MICROSOFT if name == "BitmaskDropout" else ""
        y, mask = op.op(domain, name)(op.Add(n.x, n.bias), n.ratio, n.training_mode, seed=n.seed)
        return (y if n.residual is None else op.Add(y, n.residual)), mask

    return body


def bias_dropout(x: Tensor, bias: Tensor, residual: Tensor | None, ratio: Any, training: Any) -> tuple[Tensor, Tensor]:
    y, mask = dropout_of_any_ratio(x + bias, ratio, training)
    return (y if residual is None else y + residual), mask


def packed_bias_dropout(
    x: Tensor, bias: Tensor, residual: Tensor | None, ratio: Any, training: Any
) -> tuple[Tensor, Tensor]:
    y, mask = bias_dropout(x, bias, residual, ratio, training)
    return y, packed(mask)


def _bias_dropout(name: str, inner: str, kernel: Any, mask: Any, axes: Any) -> None:
    define_by_body(
        name,
        ("x", "bias", "residual?", "ratio?", "training_mode?"),
        _bias_body(inner),
        lambda n, *arguments: Call(kernel, *arguments),
        domain=MICROSOFT,
        outputs=("y", "mask"),
        attributes={"seed": None},
        shapes=lambda n: (type_of(n.x), mask(n)),
        axes=axes,
        nondiff_inputs=frozenset({"ratio", "training_mode"}),
        synchronizes=always,
        effects=Effects.RANDOM,
        flops=lambda n: sizes.multiply(3, numel(n.x)),
    )


def _unpacked_mask(n: NodeView) -> TensorType:
    return TensorType(ir.DataType.BOOL, sizes.dims_of(n.x))


_bias_dropout("BiasDropout", "Dropout", bias_dropout, _unpacked_mask, broadcast_axes)
_bias_dropout("BitmaskBiasDropout", "BitmaskDropout", packed_bias_dropout, lambda n: _words(n, n.x), no_axes)
