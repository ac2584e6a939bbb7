"""Dropout whose mask is packed, 32 elements per word; and dropout of a sum.

    BitmaskDropout(x, ratio, training_mode) -> y, mask       mask: uint32 [ceil(elements / 32)], bit i of word w is
                                                             element 32 w + i: 1 if kept
    BitmaskDropoutGrad(dy, mask, ratio, training_mode) -> dx
    BiasDropout(x, bias, residual, ratio, training_mode) -> y, mask           residual + dropout(x + bias)
    BitmaskBiasDropout                                                        the same, with a packed mask

A packed mask takes an eighth of the bytes of Dropout's. `dropout.py` says how a node samples.
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
    define_pure,
    no_axes,
)
from onnxtrain.ops.definition import Call, Effects, Gradient, Kernel, NodeView, OpDef, numel
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.interfaces.recompute import REPLAYS, Replay
from onnxtrain.ops.random.dropout import (
    apply_mask,
    drop_ratio,
    dropout,
    dropout_backward_of_dynamic_ratio,
    dropout_of_dynamic_ratio,
    dropout_scale,
    drops_elements,
    fast_dropout,
    reads_ratio_on_host,
    uses_fast_rng,
)
from onnxtrain.ops.random.keyed_bits import DROP_LEVELS
from onnxtrain.ops.registry import define

Tensor = torch.Tensor
INT64 = ir.DataType.INT64
_WORD = 32


def _mask_type(n: NodeView, value: ir.Value) -> TensorType:
    return TensorType(ir.DataType.UINT32, (sizes.floor_divide(sizes.add(numel(value), _WORD - 1), _WORD),))


# Packing. PyTorch has hardly any op for uint32: words are viewed as their bytes, lowest first. Eight truth values are
# the bytes of an int64: a multiplication packs them into its highest byte, a table unpacks them.

_PACK_FACTOR = sum(1 << (56 - 7 * i) for i in range(8))


@functools.cache
def _unpack_table(device: torch.device) -> Tensor:
    """Return the table that maps a byte to its bits, as the bytes of an int64: int64 [256]."""
    bits = torch.arange(256, device=device)[:, None].bitwise_right_shift(torch.arange(8, device=device))
    return bits.bitwise_and_(1).to(torch.uint8).view(torch.int64).view(-1)


def packed(mask: Tensor) -> Tensor:
    """Pack truth values into bits: uint32 [ceil(elements / 32)]. Overwrites the mask."""
    count, flat = mask.numel(), mask.reshape(-1).view(torch.uint8)
    if count % _WORD:
        flat = torch.cat((flat, flat.new_zeros(-count % _WORD)))
    return (
        flat.view(torch.int64)
        .mul_(_PACK_FACTOR)
        .view(torch.uint8)[7::8]
        .clone(memory_format=torch.contiguous_format)
        .view(torch.uint32)
    )


def unpacked(words: Tensor, shape: Sequence[int]) -> Tensor:
    """Unpack bits into truth values."""
    truth_values = _unpack_table(words.device).index_select(0, words.view(torch.uint8).to(torch.int32))
    return truth_values.view(torch.bool)[: torch.Size(shape).numel()].view(shape)


def _powers(op: Builder) -> ir.Value:
    return op.constant([2**i for i in range(_WORD)], INT64)


def _packed(op: Builder, n: NodeView, mask: ir.Value) -> ir.Value:
    ((_, (words,)),) = (_mask_type(n, n.x),)
    count = numel(n.x)
    bits = reshaped(op, op.Cast(mask, to=INT64), [count])
    missing = sizes.subtract(sizes.multiply(words, _WORD), count)
    padded = TensorType(INT64, (sizes.multiply(words, _WORD),))
    bits = op.node("", "Pad", (bits, op.sizes([0, missing])), {}, types=[padded]).outputs[0]
    weighted = op.Mul(reshaped(op, bits, [words, _WORD]), _powers(op))
    return op.Cast(op.ReduceSum(weighted, int64_vector(op, [1]), keepdims=0), to=ir.DataType.UINT32)


def _unpacked(op: Builder, n: NodeView) -> ir.Value:
    (words,), count = sizes.dims_of(n.mask), numel(n.dy)
    columns = op.Div(reshaped(op, op.Cast(n.mask, to=INT64), [words, 1]), _powers(op))
    bits = reshaped(op, op.Mod(columns, op.scalar(2, INT64)), [sizes.multiply(words, _WORD)])
    cut = (bits, op.sizes([0]), op.sizes([count]), op.sizes([0]))
    bits = op.node("", "Slice", cut, {}, types=[TensorType(INT64, (count,))]).outputs[0]
    return op.Cast(reshaped(op, bits, sizes.dims_of(n.dy)), to=ir.DataType.BOOL)


# BitmaskDropout


def packed_dropout(x: Tensor, keep: float, scale: float) -> tuple[Tensor, Tensor]:
    y, mask = dropout(x, keep, scale)
    return y, packed(mask)


def fast_packed_dropout(x: Tensor, dropped: int, scale: float) -> tuple[Tensor, Tensor]:
    y, mask = fast_dropout(x, dropped, scale)
    return y, packed(mask)


def packed_dropout_of_any_ratio(x: Tensor, ratio: Any, training: Any) -> tuple[Tensor, Tensor]:
    y, mask = dropout_of_dynamic_ratio(x, ratio, training)
    return y, packed(mask)


def _bitmask_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    y, mask = op.Dropout(n.x, n.ratio, n.training_mode, seed=n.seed)
    return y, _packed(op, n, mask)


def _bitmask_gradient(op: Builder, n: NodeView, dy: ir.Value | None, _: None) -> list[ir.Value | None]:
    return [None if dy is None else _masked_nodes(op, n, dy, n.mask), None, None][: len(n.node.inputs)]


def _masked_nodes(op: Builder, n: NodeView, x: ir.Value, mask: ir.Value) -> ir.Value:
    """Apply the mask and scale of BitmaskDropout to x: BitmaskDropoutGrad computes the same."""
    ratio = op.scalar(drop_ratio(n), ir.DataType.DOUBLE) if drops_elements(n) else n.ratio
    return op.ms.BitmaskDropoutGrad(x, mask, ratio, n.training_mode)


def _scale(n: NodeView, value: ir.Value) -> float:
    return dropout_scale(drop_ratio(n), TORCH_DTYPES[dtype_of(value)])


BITMASK_DROPOUT = define(
    OpDef(
        domain=MICROSOFT,
        name="BitmaskDropout",
        inputs=("x", "ratio?", "training_mode?"),
        outputs=("y", "mask"),
        attributes={"seed": None},
        from_torch={},
        shapes=lambda n: (type_of(n.x), _mask_type(n, n.x)),
        body=_bitmask_body,
        gradient=(Gradient(_bitmask_gradient, reads=("mask",)),),
        nondiff_inputs=frozenset({"ratio", "training_mode"}),
        kernels=(
            Kernel(
                lower=lambda n, x, *_: Call(fast_packed_dropout, x, round(drop_ratio(n) * DROP_LEVELS), _scale(n, n.x)),
                applies=lambda n, device: uses_fast_rng(n),
            ),
            Kernel(
                lower=lambda n, x, *_: Call(packed_dropout, x, 1 - drop_ratio(n), _scale(n, n.x)),
                applies=lambda n, device: drops_elements(n),
                workspace_bytes=lambda n: numel(n.x),  # the unpacked mask
            ),
            Kernel(
                lower=lambda n, *arguments: Call(packed_dropout_of_any_ratio, *arguments),
                accepts_scalars=True,
                synchronizes=reads_ratio_on_host,
            ),
        ),
        axes=lambda n: NO_AXES,  # a word spans several rows
        effects=Effects.RANDOM,
        aliases={},
    )
)
REPLAYS.register(BITMASK_DROPOUT, Replay(("mask",), lambda op, n, mask: _masked_nodes(op, n, n.x, mask)))


def packed_masked(dy: Tensor, mask: Tensor, scale: float) -> Tensor:
    return apply_mask(dy, unpacked(mask, dy.shape), scale)


def packed_dropout_backward(dy: Tensor, mask: Tensor, ratio: Any, training: Any) -> Tensor:
    return dropout_backward_of_dynamic_ratio(dy, unpacked(mask, dy.shape), ratio, training)


define_pure(
    MICROSOFT,
    "BitmaskDropoutGrad",
    ("dy", "mask", "ratio?", "training_mode?"),
    ("dx",),
    shapes=lambda n: (type_of(n.dy),),
    body=lambda op, n: op.ms.DropoutGrad(n.dy, _unpacked(op, n), n.ratio, n.training_mode),
    lower=lambda n, *arguments: Call(packed_dropout_backward, *arguments),
    synchronizes=reads_ratio_on_host,
    kernels=(
        Kernel(
            lower=lambda n, dy, mask, *_: Call(packed_masked, dy, mask, _scale(n, n.dy)),
            applies=lambda n, device: drops_elements(n),
            workspace_bytes=lambda n: numel(n.dy),  # the unpacked mask
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
    y, mask = dropout_of_dynamic_ratio(x + bias, ratio, training)
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
_bias_dropout("BitmaskBiasDropout", "BitmaskDropout", packed_bias_dropout, lambda n: _mask_type(n, n.x), no_axes)
