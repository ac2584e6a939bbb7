"""Constructors of attention ops whose kernels choose what they save for backward.

Each family has three ops; `saved` is a tensor that only the matching gradient kernel reads:

    Name(operands) -> y, saved
    NameDropout(operands, ratio, training_mode) -> y, saved, dropout_mask
    NameGrad(dy, operands, y, saved, dropout_mask?, ratio?) -> dq, dk, dv, and an optional fourth gradient
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.values import OWN, TensorType, constant_of, dtype_of
from onnxtrain.ops.attention.scores import score_dtype, score_factor
from onnxtrain.ops.constructors import never
from onnxtrain.ops.definition import NOT_DIFFERENTIABLE, Body, Effects, Gradient, GradientRule, Kernel, NodeView, OpDef
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.random.dropout import drop_ratio, dropout_scale, drops_elements, uses_fast_rng
from onnxtrain.ops.random.keyed_bits import DROP_LEVELS
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
    saved: str,
    *,
    dropout: bool,
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
        name: of the family.
        operands: the inputs, dropout's excepted. The gradient reads all of them but `fill`, which is a number.
        saved: the name of the second output.
        dropout: whether the op has dropout.
        types: returns the types of the outputs.
        body: builds the op's meaning in standard ops.
        gradient: builds NameGrad.
        nondiff_operands: operands that never have a gradient.
        kernels: candidates, in order of preference.
        axes: returns the axis map.
        columns: returns how many columns the scores of a row have.
        attributes: name to default.
    """
    outputs = ("y", saved, *(("dropout_mask",) if dropout else ()))
    names = [operand.rstrip("?") for operand in operands]
    return define(
        OpDef(
            domain=OWN,
            name=f"{name}Dropout" if dropout else name,
            inputs=(*operands, *(("ratio", "training_mode") if dropout else ())),
            outputs=outputs,
            attributes=attributes,
            since_version=1,
            from_torch={},
            shapes=types,
            body=body,
            ort_compatible=never,
            gradient=(Gradient(gradient, reads=(*(n for n in names if n != "fill"), *outputs)),),
            nondiff_inputs=nondiff_operands | {"ratio", "training_mode"} if dropout else nondiff_operands,
            kernels=kernels,
            axes=axes,
            effects=Effects.RANDOM if dropout else Effects.NONE,
            aliases={},
            flops=_flops(2, columns),
            host_eval=None,
            nondiff_outputs=frozenset({saved}),
            scalar_factor=score_factor,
        )
    )


def define_attention_grad(
    name: str,
    operands: tuple[str, ...],
    saved: str,
    *,
    fourth_gradient: str,
    types: Types,
    body: Body,
    kernels: tuple[Kernel, ...],
    axes: Axes,
    columns: Columns,
    attributes: Mapping[str, Any],
) -> OpDef:
    """Define NameGrad; its attribute `output_<fourth_gradient>` requests the optional output `fourth_gradient`.

    See `define_attention` for the other arguments.
    """
    requested = f"output_{fourth_gradient}"
    return define(
        OpDef(
            domain=OWN,
            name=f"{name}Grad",
            inputs=("dy", *operands, "y", saved, "dropout_mask?", "ratio?"),
            outputs=("dq", "dk", "dv", f"{fourth_gradient}?"),
            attributes={**attributes, requested: 0},
            since_version=1,
            from_torch={},
            shapes=types,
            body=body,
            ort_compatible=never,
            gradient=NOT_DIFFERENTIABLE,
            nondiff_inputs=frozenset(),
            kernels=kernels,
            axes=axes,
            effects=Effects.NONE,
            aliases={},
            flops=_flops(4, columns),
            host_eval=None,
            count_outputs=lambda inputs, values: 4 if values.get(requested) else 3,
        )
    )


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


def keep_scale(n: NodeView) -> float:
    """Return the factor of the probabilities that a node's dropout keeps, rounded to the scores' element type."""
    return dropout_scale(drop_ratio(n), TORCH_DTYPES[score_dtype(dtype_of(n.q))])


def dropout_arguments(n: NodeView) -> tuple[int, float]:
    """Return `drop_count` and `keep_scale` of `DropoutOptions` for a node with dropout."""
    return round(drop_ratio(n) * DROP_LEVELS), keep_scale(n)


def grad_dropout_arguments(n: NodeView) -> tuple[int, float]:
    """Return `drop_count` and `keep_scale` of `DropoutOptions` for a gradient node, with dropout or without."""
    return (0, 1.0) if n.dropout_mask is None else dropout_arguments(n)


def dropout_may_compile(n: NodeView, device: str) -> bool:
    return may_compile(n, device) and uses_fast_rng(n)
