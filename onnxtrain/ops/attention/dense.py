"""Attention as models write it: matmul, masks, softmax, dropout, matmul; forward saves the probabilities for backward.

    ScaledDotProductAttention(q[b, h, l, e], k[b, g, s, e], v[b, g, s, d], bias?, mask?, fill?) -> y[b, h, l, d],
                                                                                  probabilities[b, h, l, s]
    ScaledDotProductAttentionDropout(.., ratio, training_mode) -> y, probabilities, dropout_mask[b, h, l, s]
    ScaledDotProductAttentionGrad(dy, q, k, v, bias?, mask?, fill?, probabilities, dropout_mask?, ratio?)
                                                                         -> dq, dk, dv, dscores[b, h, l, s]

    scores = scale * q @ kᵀ + bias; then + mask, or `fill` where a bool mask is false
    y = dropout(softmax(scores)) @ v

`scale` is 1/√e by default, `fill` is -inf. bias and mask broadcast to the scores. A row of -inf gives NaN, as Softmax
does, or 0 if `safe` is 1. h is a multiple of g. dropout_mask is true for the probabilities that dropout keeps;
`ops/random/dropout.py` says how it is sampled. `memory_efficient.py` has the ops that save no probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Sizes
from onnxtrain.graph.values import TensorType, dtype_of, is_float, rank_of, type_of
from onnxtrain.graph.verify import format_type
from onnxtrain.ops.attention.constructors import check_dropout_inputs, define_attention, define_attention_grad
from onnxtrain.ops.attention.dense_aten import attend_backward, attend_saving_probabilities
from onnxtrain.ops.attention.heads import group_size, repeat_heads, sum_over_groups
from onnxtrain.ops.attention.kernel_arguments import ScoreOptions
from onnxtrain.ops.attention.scores import (
    apply_dropout_mask,
    check_operand_ranks,
    matmul_gradients,
    scale_value,
    score_dtype,
)
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.definition import Call, Kernel, NodeView
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.gradient_masks import first_cotangent
from onnxtrain.ops.random.dropout import drop_ratio, dropout_scale, fast_mask, torch_mask, uses_fast_rng
from onnxtrain.ops.random.keyed_bits import DROP_LEVELS

Tensor = torch.Tensor
Grads = list[ir.Value | None]

OPERANDS = ("q", "k", "v", "bias?", "mask?", "fill?")
READS = ("q", "k", "v", "bias", "mask")  # by the gradient; `fill` is a number
ATTRIBUTES = {"scale": None, "safe": 0}


# Types, axes and flops


def scores_shape(n: NodeView) -> Sizes:
    check_operand_ranks(n, 4)
    shape = (*sizes.dims_of(n.q)[:3], sizes.dims_of(n.k)[2])
    for name, value in (("bias", n.bias), ("mask", n.mask)):
        if value is not None and (rank_of(value) > 4 or sizes.broadcast(shape, sizes.dims_of(value)) != shape):
            raise GraphError(
                f"the {name} of {n.definition.name} does not broadcast to the scores",
                expected=f"a shape that broadcasts to {list(shape)}",
                got=format_type(type_of(value)),
            )
    if n.bias is not None and not is_float(dtype_of(n.bias)):
        raise GraphError(
            f"the bias of {n.definition.name} has the wrong element type",
            expected="a floating-point type",
            got=format_type(type_of(n.bias)),
        )
    return shape


def result_type(n: NodeView) -> TensorType:
    return TensorType(dtype_of(n.q), (*scores_shape(n)[:3], sizes.dims_of(n.v)[3]))


def _types(n: NodeView) -> Sequence[TensorType]:
    return result_type(n), TensorType(score_dtype(dtype_of(n.q)), scores_shape(n))


def _dropout_types(n: NodeView) -> Sequence[TensorType]:
    check_dropout_inputs(n)
    return *_types(n), TensorType(ir.DataType.BOOL, scores_shape(n))


def mask_axes(x: ir.Value | None, scores: str) -> str:
    return "-" if x is None else " ".join(scores.split()[4 - rank_of(x) :])


def _axes(n: NodeView) -> str:
    heads, shared = ("h", "h") if group_size(n.q, n.k) == 1 else ("[h]", "[g]")
    scores = f"b {heads} l [s]"
    masks = [mask_axes(x, scores) for x in (n.bias, n.mask)]
    operands = [f"b {heads} l [e]", f"b {shared} [s] [e]", f"b {shared} [s] d", *masks]
    operands += ["-"] * (len(n.node.inputs) - len(operands))
    results = [f"b {heads} l d", *[scores] * (len(n.node.outputs) - 1)]
    return f"{', '.join(operands[: len(n.node.inputs)])} -> {', '.join(results)}"


def _grad_axes(n: NodeView) -> str:
    heads, shared = ("h", "h") if group_size(n.q, n.k) == 1 else ("[h]", "[g]")
    q, k, v, scores = f"b {heads} [l] [e]", f"b {shared} [s] [e]", f"b {shared} [s] [d]", f"b {heads} [l] [s]"
    y = f"b {heads} [l] [d]"
    masks = [mask_axes(x, scores) for x in (n.bias, n.mask)]
    operands = [y, q, k, v, *masks, "-", scores, "-" if n.dropout_mask is None else scores, "-"]
    results = [q, k, v, scores][: len(n.node.outputs)]
    return f"{', '.join(operands[: len(n.node.inputs)])} -> {', '.join(results)}"


# Bodies


def probabilities_of(op: Builder, n: NodeView) -> ir.Value:
    inner = score_dtype(dtype_of(n.q))
    q, k = cast(op, n.q, inner), repeat_heads(op, cast(op, n.k, inner), group_size(n.q, n.k))
    scores = op.Mul(op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), scale_value(op, q, n.scale))
    if n.bias is not None:
        scores = op.Add(scores, cast(op, n.bias, inner))
    if n.mask is not None and dtype_of(n.mask) == ir.DataType.BOOL:
        fill = op.scalar(-torch.inf, inner) if n.fill is None else cast(op, n.fill, inner)
        scores = op.Where(n.mask, scores, fill)
    elif n.mask is not None:
        scores = op.Add(scores, cast(op, n.mask, inner))
    return op.own.SafeSoftmax(scores, axis=-1) if n.safe else op.Softmax(scores, axis=-1)


def times_values(op: Builder, n: NodeView, p: ir.Value) -> ir.Value:
    v = repeat_heads(op, cast(op, n.v, dtype_of(p)), group_size(n.q, n.v))
    return cast(op, op.MatMul(p, v), dtype_of(n.q))


def _body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    p = probabilities_of(op, n)
    return times_values(op, n, p), p


def _dropout_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    p = probabilities_of(op, n)
    dropped, dropout_mask = op.Dropout(p, n.ratio, n.training_mode)
    return times_values(op, n, dropped), p, dropout_mask


def gradients_of(
    op: Builder, n: NodeView, p: ir.Value, drop: Callable[[ir.Value], ir.Value]
) -> Sequence[ir.Value | None]:
    """Return the outputs of a gradient node; `drop` applies its dropout to a tensor of the scores' shape."""
    inner, group = dtype_of(p), group_size(n.q, n.k)
    q, dy = cast(op, n.q, inner), cast(op, n.dy, inner)
    k, v = (repeat_heads(op, cast(op, x, inner), group) for x in (n.k, n.v))

    ds = op.ms.SoftmaxGrad_13(drop(op.ms.FusedMatMul(dy, v, transB=1)), p, axis=-1)
    if n.mask is not None and dtype_of(n.mask) == ir.DataType.BOOL:
        ds = op.Where(n.mask, ds, op.scalar(0.0, inner))
    dq, dk, dv = matmul_gradients(op, ds, drop(p), dy, q, k, n.scale)
    dq, dk, dv = cast(op, dq, dtype_of(n.q)), sum_over_groups(op, dk, n.k), sum_over_groups(op, dv, n.v)
    return (dq, dk, dv, ds)[: len(n.node.outputs)]


def _grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value | None]:
    return gradients_of(op, n, n.probabilities, lambda x: apply_dropout_mask(op, n, x))


# Gradient


def needs_dscores(n: NodeView) -> bool:
    """Return whether the bias or an additive mask needs a gradient."""
    return any(
        x is not None and is_float(dtype_of(x)) and n.wants(name) for name, x in (("bias", n.bias), ("mask", n.mask))
    )


def by_input(op: Builder, n: NodeView, results: Sequence[ir.Value]) -> Grads:
    """Return a gradient per input, from the outputs of the gradient node."""
    gradients: Grads = [*results[:3], *[None] * (len(n.node.inputs) - 3)]
    for index, name in ((3, "bias"), (4, "mask")):
        x = getattr(n, name)
        if x is not None and is_float(dtype_of(x)) and n.wants(name):
            gradients[index] = cast(op, results[3], dtype_of(x))
    return gradients[: len(n.node.inputs)]


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    if cotangents[0] is None:
        return [None] * len(n.node.inputs)
    dy = first_cotangent(n, cotangents)
    dropout_mask = getattr(n, "dropout_mask", None)
    ratio = None if dropout_mask is None else op.scalar(drop_ratio(n), ir.DataType.DOUBLE)
    results = op.own.ScaledDotProductAttentionGrad(
        dy, n.q, n.k, n.v, n.bias, n.mask, n.fill, n.probabilities, dropout_mask, ratio,
        scale=n.scale, safe=n.safe or None, output_dscores=int(needs_dscores(n)) or None,
    )  # fmt: skip
    return by_input(op, n, results)


def _grad_types(n: NodeView) -> Sequence[TensorType]:
    return [type_of(n.q), type_of(n.k), type_of(n.v), type_of(n.probabilities)][: len(n.node.outputs)]


# Kernels


def attend_dropout(
    q: Tensor, k: Tensor, v: Tensor, scores: ScoreOptions, ratio: float, keep_scale: float, fast: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run attention with dropout, whose mask is sampled by one call as Dropout does; it is the third output."""
    like = torch.empty((*q.shape[:3], k.size(2)), dtype=torch.bool, device=q.device)
    dropout_mask = fast_mask(like, round(ratio * DROP_LEVELS)) if fast else torch_mask(like, 1 - ratio)
    return *attend_saving_probabilities(q, k, v, scores, dropout_mask, keep_scale), dropout_mask


def _scores(n: NodeView, bias: Any, mask: Any, fill: Any) -> Call:
    return Call(ScoreOptions, n.scale, bias, mask, fill, safe=bool(n.safe))


def _lower(n: NodeView, q: Any, k: Any, v: Any, *masks: Any) -> Call:
    return Call(attend_saving_probabilities, q, k, v, _scores(n, *masks))


def _lower_dropout(n: NodeView, *inputs: Any) -> Call:
    q, k, v, *masks, _, _ = inputs
    ratio = drop_ratio(n)
    keep_scale = dropout_scale(ratio, TORCH_DTYPES[score_dtype(dtype_of(n.q))])
    return Call(attend_dropout, q, k, v, _scores(n, *masks), ratio, keep_scale, uses_fast_rng(n))


def _lower_grad(n: NodeView, dy: Any, q: Any, k: Any, v: Any, *others: Any) -> Call:
    *masks, p, dropout_mask, _ = others
    dropout = (
        []
        if n.dropout_mask is None
        else [dropout_mask, dropout_scale(drop_ratio(n), TORCH_DTYPES[dtype_of(n.probabilities)])]
    )
    return Call(attend_backward, dy, q, k, v, _scores(n, *masks), p, bool(n.output_dscores), *dropout)


def columns_of(n: NodeView) -> sizes.Size:
    return sizes.dims_of(n.k)[2]


ATTENTION = define_attention(
    "ScaledDotProductAttention",
    OPERANDS,
    ("y", "probabilities"),
    reads=(*READS, "probabilities"),
    types=_types,
    body=_body,
    gradient=_gradient,
    nondiff_operands=frozenset({"fill"}),
    kernels=(Kernel(lower=_lower, accepts_scalars=True),),
    axes=_axes,
    columns=columns_of,
    attributes=ATTRIBUTES,
)
ATTENTION_DROPOUT = define_attention(
    "ScaledDotProductAttentionDropout",
    OPERANDS,
    ("y", "probabilities", "dropout_mask"),
    dropout=True,
    reads=(*READS, "probabilities", "dropout_mask"),
    types=_dropout_types,
    body=_dropout_body,
    gradient=_gradient,
    nondiff_operands=frozenset({"fill"}),
    kernels=(Kernel(lower=_lower_dropout, accepts_scalars=True),),
    axes=_axes,
    columns=columns_of,
    attributes=ATTRIBUTES,
)
define_attention_grad(
    "ScaledDotProductAttentionGrad",
    (*OPERANDS, "probabilities", "dropout_mask?", "ratio?"),
    fourth_gradient="dscores",
    types=_grad_types,
    body=_grad_body,
    kernels=(Kernel(lower=_lower_grad, accepts_scalars=True),),
    axes=_grad_axes,
    columns=columns_of,
    attributes=ATTRIBUTES,
)
