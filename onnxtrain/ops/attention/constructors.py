"""Constructors of attention ops.

A family has an op, its gradient and, if it samples a dropout mask, the op with dropout:

    Name(operands) -> y, saved
    NameDropout(operands, ratio, training_mode) -> y, saved, and what determines the dropout mask
    NameGrad(dy, operands, saved) -> dq, dk, dv, and an optional fourth gradient
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, constant_of, dtype_of
from onnxtrain.ops.attention.kernel_arguments import DropoutOptions
from onnxtrain.ops.attention.scores import score_dtype, score_factor
from onnxtrain.ops.body_parts import cast, mul_scalar
from onnxtrain.ops.definition import (
    NOT_DIFFERENTIABLE,
    Body,
    Call,
    Effects,
    Gradient,
    GradientRule,
    Kernel,
    NodeView,
    OpDef,
)
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.interfaces.scalar_factors import SCALAR_FACTORS
from onnxtrain.ops.random.dropout import dropout_scale, drops_elements
from onnxtrain.ops.random.keyed_bits import DROP_LEVELS
from onnxtrain.ops.random.keyed_dropout import keep_mask_nodes
from onnxtrain.ops.registry import define

Types = Callable[[NodeView], Sequence[TensorType]]
Axes = Callable[[NodeView], str]
Columns = Callable[[NodeView], sizes.Size]


def _flops(matmuls: int, columns: Columns) -> Columns:
    """Return the flops of `matmuls` matmuls of the size of q @ kᵀ."""
    return lambda n: sizes.multiply(2 * matmuls, *sizes.dims_of(n.q), columns(n))


def define_attention(
    name: str,
    operands: tuple[str, ...],
    outputs: tuple[str, ...],
    *,
    dropout: bool = False,
    reads: tuple[str, ...],
    types: Types,
    body: Body,
    gradient: GradientRule,
    nondiff_operands: frozenset[str],
    kernels: tuple[Kernel, ...],
    axes: Axes,
    columns: Columns,
    attributes: Mapping[str, Any],
) -> OpDef:
    """Define Name, or NameDropout if `dropout`; see the module docstring.

    Args:
        name: of the op.
        operands: the inputs, dropout's excepted.
        outputs: y, and what is saved for backward.
        dropout: whether the op samples a dropout mask.
        reads: the operands and outputs whose elements the gradient reads.
        types: returns the types of the outputs.
        body: builds the op's meaning in standard ops.
        gradient: builds NameGrad.
        nondiff_operands: operands that never have a gradient.
        kernels: candidates, in order of preference.
        axes: returns the axis map.
        columns: returns how many columns the scores of a row have.
        attributes: name to default.
    """
    op = define(
        OpDef(
            domain=OWN,
            name=name,
            inputs=(*operands, *(("ratio", "training_mode") if dropout else ())),
            outputs=outputs,
            attributes=attributes,
            from_torch={},
            shapes=types,
            body=body,
            gradient=(Gradient(gradient, reads=reads),),
            nondiff_inputs=nondiff_operands | {"ratio", "training_mode"} if dropout else nondiff_operands,
            kernels=kernels,
            axes=axes,
            effects=Effects.RANDOM if dropout else Effects.NONE,
            aliases={},
            nondiff_outputs=frozenset(outputs[1:]),
        )
    )
    FLOPS.register(op, _flops(2, columns))
    SCALAR_FACTORS.register(op, score_factor)
    return op


def define_attention_grad(
    name: str,
    operands: tuple[str, ...],
    *,
    fourth_gradient: str = "",
    types: Types,
    body: Body,
    kernels: tuple[Kernel, ...],
    axes: Axes,
    columns: Columns,
    attributes: Mapping[str, Any],
) -> OpDef:
    """Define NameGrad; its attribute `output_<fourth_gradient>` requests the optional output `fourth_gradient`.

    See `define_attention` for the other arguments; `operands` come after dy.
    """
    requested = f"output_{fourth_gradient}" if fourth_gradient else ""
    optional = (f"{fourth_gradient}?",) if fourth_gradient else ()
    op = define(
        OpDef(
            domain=OWN,
            name=name,
            inputs=("dy", *operands),
            outputs=("dq", "dk", "dv", *optional),
            attributes={**attributes, requested: 0} if requested else attributes,
            from_torch={},
            shapes=types,
            body=body,
            gradient=NOT_DIFFERENTIABLE,
            nondiff_inputs=frozenset(),
            kernels=kernels,
            axes=axes,
            effects=Effects.NONE,
            aliases={},
            count_outputs=lambda inputs, values: 4 if values.get(requested) else 3,
        )
    )
    FLOPS.register(op, _flops(4, columns))
    return op


def check_dropout_inputs(n: NodeView) -> None:
    """Check the ratio and the training mode of a node with dropout.

    Raises:
        GraphError: they are not constant, or the node drops nothing or everything.
    """
    if not drops_elements(n):
        raise GraphError(
            f"{n.definition.name} has invalid dropout inputs",
            expected="a constant ratio between 0 and 1, exclusive, and a constant training_mode of true",
            got=f"ratio {_constant_text(n.ratio)} and training_mode {_constant_text(n.training_mode)}",
        )


def _constant_text(value: ir.Value | None) -> str:
    number = None if value is None else constant_of(value)
    return "unknown" if number is None else str(number)


# Dropout whose mask is a function of a key


KEYED = {"dropped": 0}  # attributes of an op with the input `key?`: how many of `DROP_LEVELS` values drop a probability


def check_key(n: NodeView) -> None:
    """Check that a node has a key just if it drops probabilities.

    Raises:
        GraphError: it has one without the other.
    """
    if (n.key is None) != (n.dropped == 0) or not 0 <= n.dropped < DROP_LEVELS:
        raise GraphError(
            f"{n.definition.name} has invalid dropout arguments",
            expected=f"a key and `dropped` from 1 to {DROP_LEVELS - 1}, or neither",
            got=f"{'no' if n.key is None else 'a'} key and dropped = {n.dropped}",
        )


def keep_scale(n: NodeView) -> float:
    """Return the factor of the probabilities that a node with a key keeps, rounded to the scores' element type."""
    return dropout_scale(n.dropped / DROP_LEVELS, TORCH_DTYPES[score_dtype(dtype_of(n.q))])


def dropout_options(n: NodeView, key: Any) -> Call | None:
    """Return the `DropoutOptions` of a node with the input `key?`; None without a key."""
    return None if n.key is None else Call(DropoutOptions, key, n.dropped, keep_scale(n))


def drop_by_key(op: Builder, n: NodeView, x: ir.Value, index: ir.Value) -> ir.Value:
    """Drop the elements of x that the node's key drops; `index` numbers the elements. Return x without a key."""
    if n.key is None:
        return x
    kept = cast(op, keep_mask_nodes(op, n.key, index, n.dropped), dtype_of(x))
    return mul_scalar(op, op.Mul(x, kept), keep_scale(n))
