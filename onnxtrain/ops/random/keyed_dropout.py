"""Dropout whose mask is not saved: backward and recompute regenerate it from a key.

    DropoutKey() -> key                   int64 [2], sampled from the generator: the only random op of the two
    KeyedDropout(x, key, residual) -> y   y = x * (bits >= dropped ? scale : 0) + residual; for the bits of an element
                                          see `keyed_bits.py`

An element is dropped for `dropped` of its 65536 possible values. The residual has x's shape and type, or is absent.
The gradient with respect to x is KeyedDropout of dy. The pass `regenerate_dropout_masks` replaces Dropout with them
under `rng="fast"`, and `fuse_sums` adds the residual.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, dtype_of
from onnxtrain.ops.body_parts import cast, mul_scalar, reshaped
from onnxtrain.ops.constructors import always, define_pure, no_axes, same_as, with_addend
from onnxtrain.ops.definition import (
    NOT_DIFFERENTIABLE,
    REQUIRED,
    Call,
    Effects,
    Gradient,
    InPlaceCapableCall,
    Kernel,
    NodeView,
    OpDef,
    numel,
)
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.interfaces.addends import OUTPUT_ADDENDS
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.random import keyed_bits
from onnxtrain.ops.random.dropout import drop_ratio, dropout_scale
from onnxtrain.ops.registry import define
from onnxtrain.ops.reshape.dims import unsqueezed
from onnxtrain.ops.reshape.rows import arange
from onnxtrain.ops.reshape.slicing import sliced

_INT64 = ir.DataType.INT64


# DropoutKey


def _key_body(op: Builder, n: NodeView) -> ir.Value:
    """Sample 53 random bits per element: stock onnxruntime has no op that samples more."""
    bound = 2.0**62
    wide = op.RandomUniform(shape=[2], low=-bound, high=bound, dtype=int(ir.DataType.DOUBLE))
    return op.Cast(wide, to=_INT64)


DROPOUT_KEY = define(
    OpDef(
        domain=OWN,
        name="DropoutKey",
        inputs=(),
        outputs=("key",),
        attributes={},
        from_torch={},
        shapes=lambda n: (TensorType(_INT64, (2,)),),
        body=_key_body,
        gradient=NOT_DIFFERENTIABLE,
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=lambda n: Call(keyed_bits.sample_key)),),
        axes=no_axes,
        effects=Effects.RANDOM,
        aliases={},
    )
)
FLOPS.register(DROPOUT_KEY, lambda n: 2)


# KeyedDropout


def _words(op: Builder, key: ir.Value, counters: ir.Value) -> ir.Value:
    """`keyed_bits.random_words`: int64 wraps around; a right shift is a floor division by a power of two."""

    def mixed(z: ir.Value, shift: int) -> ir.Value:
        shifted = op.own.FloorDivide(z, op.scalar(2**shift, _INT64))
        without_sign = op.Mod(shifted, op.scalar(2 ** (64 - shift), _INT64))
        return op.BitwiseXor(z, without_sign)

    first, second = (sliced(op, key, 0, i, i + 1) for i in (0, 1))
    z = op.Add(op.Mul(counters, op.scalar(keyed_bits.GAMMA, _INT64)), first)
    z = op.BitwiseXor(op.Mul(mixed(z, keyed_bits.SHIFTS[0]), op.scalar(keyed_bits.FIRST, _INT64)), second)
    z = op.Mul(mixed(z, keyed_bits.SHIFTS[1]), op.scalar(keyed_bits.SECOND, _INT64))
    return mixed(z, keyed_bits.SHIFTS[2])


def _is_kept(op: Builder, bits: ir.Value, dropped: int) -> ir.Value:
    """Return whether 16 bits, the lowest of each integer, keep an element.

    Flipping their sign bit makes them unsigned.
    """
    flipped = op.Mod(
        op.Add(bits, op.scalar(keyed_bits.DROP_LEVELS // 2, _INT64)), op.scalar(keyed_bits.DROP_LEVELS, _INT64)
    )
    return op.GreaterOrEqual(flipped, op.scalar(dropped, _INT64))


_QUARTERS = [1, 2**16, 2**32, 2**48]


def drop_count(n: NodeView) -> int:
    """Return for how many of its `DROP_LEVELS` values a key drops a probability of an attention."""
    return round(drop_ratio(n) * keyed_bits.DROP_LEVELS)


def keep_mask_nodes(op: Builder, key: ir.Value, index: ir.Value, dropped: int) -> ir.Value:
    """Return which elements a key keeps; `index` holds their numbers, int64 of any shape."""
    four = op.scalar(4, _INT64)
    words = _words(op, key, op.Div(index, four))
    quarter = op.Gather(op.constant(_QUARTERS, _INT64), op.Mod(index, four), axis=0)
    return _is_kept(op, op.own.FloorDivide(words, quarter), dropped)


def _body(op: Builder, n: NodeView) -> ir.Value:
    count = numel(n.x)
    counters = arange(op, sizes.floor_divide(sizes.add(count, 3), 4))
    quarters = op.own.FloorDivide(unsqueezed(op, _words(op, n.key, counters), 1), op.constant(_QUARTERS, _INT64))
    flat = reshaped(op, _is_kept(op, quarters, n.dropped), [-1])
    mask = reshaped(op, sliced(op, flat, 0, 0, count), sizes.dims_of(n.x))
    y = mul_scalar(op, op.Mul(n.x, cast(op, mask, dtype_of(n.x))), node_keep_scale(n, n.x))
    return y if n.residual is None else op.Add(y, n.residual)


def node_keep_scale(n: NodeView, x: ir.Value) -> float:
    """Return the factor of the kept elements of x."""
    return dropout_scale(n.dropped / keyed_bits.DROP_LEVELS, TORCH_DTYPES[dtype_of(x)])


def _lower(n: NodeView, x: Any, key: Any, residual: Any) -> Call:
    return InPlaceCapableCall(keyed_bits.drop, keyed_bits.drop_, x, key, n.dropped, node_keep_scale(n, n.x), residual)


def _lower_compiled(n: NodeView, x: Any, key: Any, residual: Any) -> Call:
    keyed_bits.LIBRARY.request()
    kernel, in_place = keyed_bits.drop_compiled, keyed_bits.drop_compiled_
    return InPlaceCapableCall(kernel, in_place, x, key, n.dropped, node_keep_scale(n, n.x), residual)


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    dx = op.own.KeyedDropout(dy, n.key, dropped=n.dropped) if n.wants("x") else None
    return [dx, None, dy][: len(n.node.inputs)]


KEYED_DROPOUT = define_pure(
    OWN,
    "KeyedDropout",
    ("x", "key", "residual?"),
    ("y",),
    attributes={"dropped": REQUIRED},
    shapes=with_addend("residual", same_as("x")),
    body=_body,
    gradient=(Gradient(_gradient, reads=("key",)),),
    nondiff_inputs=frozenset({"key"}),
    kernels=(
        Kernel(lower=_lower_compiled, applies=may_compile, in_place_input=0),
        Kernel(lower=_lower, synchronizes=always, in_place_input=0),
    ),
    axes=no_axes,  # the bits of an element depend on its index
    flops=lambda n: sizes.multiply(2 if n.residual is None else 3, numel(n.x)),
)
OUTPUT_ADDENDS.register(KEYED_DROPOUT, "residual")
