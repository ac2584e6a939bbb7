"""Definitions of attention whose kernels keep for backward what they like: without dropout, with it, the gradient.

A family of three: Name(operands) -> y, kept; NameDropout(operands, ratio, training_mode) -> y, kept, noise; and
NameGrad(dy, operands, y, kept, noise?, ratio?) -> dq, dk, dv, and a fourth where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxtrain.graph import sizes
from onnxtrain.graph.values import OWN, TensorType, dtype_of
from onnxtrain.ops.attention.parts import accumulated, scores_factor
from onnxtrain.ops.constructors import TORCH_DTYPES, never
from onnxtrain.ops.definition import NOT_DIFFERENTIABLE, Body, Effects, Gradient, GradientRule, Kernel, NodeView, OpDef
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.random.dropout import DRAWS, draws_fast, ratio_of, scale_of
from onnxtrain.ops.registry import define

Types = Callable[[NodeView], Sequence[TensorType]]
Axes = Callable[[NodeView], str]
Columns = Callable[[NodeView], sizes.Size]


def _flops(products: int, columns: Columns) -> Columns:
    """Of as many products of all rows with their columns."""
    return lambda n: sizes.multiply(2 * products, *sizes.dims_of(n.q), columns(n))


def define_attention(
    name: str,
    operands: tuple[str, ...],
    kept: str,
    *,
    dropout: bool,
    types: Types,
    body: Body,
    gradient: GradientRule,
    constants: frozenset[str],
    kernels: tuple[Kernel, ...],
    axes: Axes,
    columns: Columns,
    attributes: Mapping[str, Any],
) -> OpDef:
    """Defines one op that attends. Its second output is named `kept`; `columns` is how many a row sees.

    `constants` are operands that are never differentiated. The gradient reads them all but `fill`, a number.
    """
    outputs = ("y", kept, *(("noise",) if dropout else ()))
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
            nondiff_inputs=constants | {"ratio", "training_mode"} if dropout else constants,
            kernels=kernels,
            axes=axes,
            effects=Effects.RANDOM if dropout else Effects.NONE,
            aliases={},
            flops=_flops(2, columns),
            host_eval=None,
            nondiff_outputs=frozenset({kept}),
            scalar_factor=scores_factor,
        )
    )


def define_gradient(
    name: str,
    operands: tuple[str, ...],
    kept: str,
    *,
    fourth: str,
    types: Types,
    body: Body,
    kernels: tuple[Kernel, ...],
    axes: Axes,
    columns: Columns,
    attributes: Mapping[str, Any],
) -> OpDef:
    """Defines the gradient of both; the attribute `of_<fourth>` asks for its output `d<fourth>`."""
    asked = f"of_{fourth}"
    return define(
        OpDef(
            domain=OWN,
            name=f"{name}Grad",
            inputs=("dy", *operands, "y", kept, "noise?", "ratio?"),
            outputs=("dq", "dk", "dv", f"d{fourth}?"),
            attributes={**attributes, asked: 0},
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
            count_outputs=lambda inputs, given: 4 if given.get(asked) else 3,
        )
    )


def kept_factor(n: NodeView) -> float:
    """What a node's dropout multiplies by the probabilities that it keeps, in the type of the scores."""
    return scale_of(ratio_of(n), TORCH_DTYPES[accumulated(dtype_of(n.q))])


def drops(n: NodeView) -> tuple[int, float]:
    """A node's dropout as the compiled kernel takes it: how many draws are dropped, and the factor of the others."""
    return round(ratio_of(n) * DRAWS), kept_factor(n)


def drops_in_gradient(n: NodeView) -> tuple[int, float]:
    """The same of a gradient, whose node may have no dropout."""
    return (0, 1.0) if n.noise is None else drops(n)


def dropout_may_compile(n: NodeView, device: str) -> bool:
    return may_compile(n, device) and draws_fast(n)
