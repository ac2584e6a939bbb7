"""Attention as models write it: matmul, masks, softmax, dropout, matmul; forward saves the probabilities for backward.

    ScaledDotProductAttention(q[b, h, l, e], k[b, g, s, e], v[b, g, s, d], bias?, mask?, fill?) -> y[b, h, l, d],
                                                                                  probabilities[b, h, l, s]
    ScaledDotProductAttentionDropout(.., ratio, training_mode) -> y, probabilities, dropout_mask[b, h, l, s]
    ScaledDotProductAttentionGrad(dy, q, k, v, bias?, mask?, fill?, y, probabilities, dropout_mask?, ratio?)
                                                                         -> dq, dk, dv, dscores[b, h, l, s]

    scores = scale * q @ kᵀ + bias; then + mask, or `fill` where a bool mask is false
    y = dropout(softmax(scores)) @ v

`scale` is 1/√e by default, `fill` is -inf. bias and mask broadcast to the scores. A row of -inf gives NaN, as Softmax
does, or 0 if `safe` is 1. h is a multiple of g. dropout_mask is true for the probabilities that dropout keeps;
`ops/random/dropout.py` says how it is sampled.

The element types of probabilities and dropout_mask are those of the body. A kernel may return other tensors in their
place (a logsumexp, a key): only the gradient kernel that belongs to it reads them, and it distinguishes the cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Sizes
from onnxtrain.graph.values import TensorType, dtype_of, is_float, rank_of, type_of
from onnxtrain.graph.verify import format_type
from onnxtrain.ops.attention import compiled_kernels
from onnxtrain.ops.attention.constructors import (
    check_dropout_inputs,
    define_attention,
    define_attention_grad,
    dropout_arguments,
    dropout_may_compile,
    grad_dropout_arguments,
)
from onnxtrain.ops.attention.dense_aten import attend, attend_backward, score_torch_dtype
from onnxtrain.ops.attention.dense_compiled import (
    attend_backward_compiled,
    attend_compiled,
    attend_dropout_compiled,
)
from onnxtrain.ops.attention.heads import group_size, repeat_heads, sum_over_groups
from onnxtrain.ops.attention.kernel_arguments import ScoreOptions
from onnxtrain.ops.attention.masks import is_causal_mask
from onnxtrain.ops.attention.scores import (
    apply_dropout_mask,
    check_operand_ranks,
    matmul_gradients,
    scale_value,
    score_dtype,
)
from onnxtrain.ops.body_parts import cast
from onnxtrain.ops.definition import Call, Kernel, NodeView, OpDef
from onnxtrain.ops.elementwise.arithmetic import number_of
from onnxtrain.ops.gradient_masks import first_cotangent
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.random.dropout import drop_ratio, dropout_scale, fast_mask, torch_mask, uses_fast_rng
from onnxtrain.ops.random.keyed_bits import DROP_LEVELS, KEY_BYTES

Tensor = torch.Tensor
Grads = list[ir.Value | None]

_NAME, _SAVED = "ScaledDotProductAttention", "probabilities"
_OPERANDS = ("q", "k", "v", "bias?", "mask?", "fill?")
_ATTRIBUTES = {"scale": None, "safe": 0}


# Types, axes and flops


def _scores_shape(n: NodeView) -> Sizes:
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


def _types(n: NodeView) -> Sequence[TensorType]:
    shape = _scores_shape(n)
    y = TensorType(dtype_of(n.q), (*shape[:3], sizes.dims_of(n.v)[3]))
    return y, TensorType(score_dtype(dtype_of(n.q)), shape)


def _dropout_types(n: NodeView) -> Sequence[TensorType]:
    check_dropout_inputs(n)
    return *_types(n), TensorType(ir.DataType.BOOL, _scores_shape(n))


def _mask_axes(x: ir.Value | None, scores: str) -> str:
    return "-" if x is None else " ".join(scores.split()[4 - rank_of(x) :])


def _axes(n: NodeView) -> str:
    heads, shared = ("h", "h") if group_size(n.q, n.k) == 1 else ("[h]", "[g]")
    scores = f"b {heads} l [s]"
    masks = [_mask_axes(x, scores) for x in (n.bias, n.mask)]
    operands = [f"b {heads} l [e]", f"b {shared} [s] [e]", f"b {shared} [s] d", *masks]
    operands += ["-"] * (len(n.node.inputs) - len(operands))
    results = [f"b {heads} l d", *[scores] * (len(n.node.outputs) - 1)]
    return f"{', '.join(operands[: len(n.node.inputs)])} -> {', '.join(results)}"


def _grad_axes(n: NodeView) -> str:
    heads, shared = ("h", "h") if group_size(n.q, n.k) == 1 else ("[h]", "[g]")
    q, k, v, scores = f"b {heads} [l] [e]", f"b {shared} [s] [e]", f"b {shared} [s] [d]", f"b {heads} [l] [s]"
    y = f"b {heads} [l] [d]"
    masks = [_mask_axes(x, scores) for x in (n.bias, n.mask)]
    operands = [y, q, k, v, *masks, "-", y, scores, "-" if n.dropout_mask is None else scores, "-"]
    results = [q, k, v, scores][: len(n.node.outputs)]
    return f"{', '.join(operands[: len(n.node.inputs)])} -> {', '.join(results)}"


# Bodies


def _probabilities(op: Builder, n: NodeView) -> ir.Value:
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
    result: ir.Value = op.own.SafeSoftmax(scores, axis=-1) if n.safe else op.Softmax(scores, axis=-1)
    return result


def _times_values(op: Builder, n: NodeView, p: ir.Value) -> ir.Value:
    v = repeat_heads(op, cast(op, n.v, dtype_of(p)), group_size(n.q, n.v))
    return cast(op, op.MatMul(p, v), dtype_of(n.q))


def _body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    p = _probabilities(op, n)
    return _times_values(op, n, p), p


def _dropout_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    p = _probabilities(op, n)
    dropped, dropout_mask = op.Dropout(p, n.ratio, n.training_mode)
    return _times_values(op, n, dropped), p, dropout_mask


def _grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value | None]:
    p = n.probabilities
    inner, group = dtype_of(p), group_size(n.q, n.k)
    q, dy = cast(op, n.q, inner), cast(op, n.dy, inner)
    k, v = (repeat_heads(op, cast(op, x, inner), group) for x in (n.k, n.v))

    ds = op.ms.SoftmaxGrad_13(apply_dropout_mask(op, n, op.ms.FusedMatMul(dy, v, transB=1)), p, axis=-1)
    if n.mask is not None and dtype_of(n.mask) == ir.DataType.BOOL:
        ds = op.Where(n.mask, ds, op.scalar(0.0, inner))
    dq, dk, dv = matmul_gradients(op, ds, apply_dropout_mask(op, n, p), dy, q, k, n.scale)
    dq, dk, dv = cast(op, dq, dtype_of(n.q)), sum_over_groups(op, dk, n.k), sum_over_groups(op, dv, n.v)
    return (dq, dk, dv, ds)[: len(n.node.outputs)]


# Gradient


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    if cotangents[0] is None:
        return [None] * len(n.node.inputs)
    dy = first_cotangent(n, cotangents)
    dropout_mask = getattr(n, "dropout_mask", None)
    output_dmask = n.mask is not None and is_float(dtype_of(n.mask)) and n.wants("mask")
    output_dscores = output_dmask or (n.bias is not None and n.wants("bias"))
    ratio = None if dropout_mask is None else op.scalar(drop_ratio(n), ir.DataType.DOUBLE)
    results = op.own.ScaledDotProductAttentionGrad(
        dy, n.q, n.k, n.v, n.bias, n.mask, n.fill, n.y, n.probabilities, dropout_mask, ratio,
        scale=n.scale, safe=n.safe or None, output_dscores=int(output_dscores) or None,
    )  # fmt: skip
    gradients: Grads = [*results[:3], None, None, None, None, None]
    if n.bias is not None and n.wants("bias"):
        gradients[3] = cast(op, results[3], dtype_of(n.bias))
    if output_dmask:
        gradients[4] = cast(op, results[3], dtype_of(n.mask))
    return gradients[: len(n.node.inputs)]


def _grad_types(n: NodeView) -> Sequence[TensorType]:
    return [type_of(n.q), type_of(n.k), type_of(n.v), type_of(n.probabilities)][: len(n.node.outputs)]


# Kernels


def attend_dropout(
    q: Tensor, k: Tensor, v: Tensor, scores: ScoreOptions, ratio: float, fast: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `attend` with dropout, whose mask is sampled by one call as Dropout does; it is the third output."""
    like = torch.empty((*q.shape[:3], k.size(2)), dtype=torch.bool, device=q.device)
    dropout_mask = fast_mask(like, round(ratio * DROP_LEVELS)) if fast else torch_mask(like, 1 - ratio)
    y, p = attend(q, k, v, scores, dropout_mask, dropout_scale(ratio, score_torch_dtype(q)))
    return y, p, dropout_mask


def _scores(n: NodeView, bias: Any, mask: Any, fill: Any) -> Call:
    return Call(ScoreOptions, n.scale, bias, mask, fill, safe=bool(n.safe))


def _lower(n: NodeView, q: Any, k: Any, v: Any, *masks: Any) -> Call:
    return Call(attend, q, k, v, _scores(n, *masks))


def _lower_dropout(n: NodeView, *inputs: Any) -> Call:
    q, k, v, *masks, _, _ = inputs
    return Call(attend_dropout, q, k, v, _scores(n, *masks), drop_ratio(n), uses_fast_rng(n))


def _lower_grad(n: NodeView, *inputs: Any) -> Call:
    dy, q, k, v, *masks, _, p, dropout_mask, _ = inputs
    return Call(
        attend_backward,
        dy,
        q,
        k,
        v,
        _scores(n, *masks),
        p,
        bool(n.output_dscores),
        dropout_mask,
        grad_dropout_arguments(n)[1],
    )


def _compiled_scores(n: NodeView, bias: Any, mask: Any, fill: Any) -> Call:
    """Request the library and return its score options: a causal bias or mask becomes the flag `causal`."""
    compiled_kernels.request(n.q)
    fill_number = -math.inf if n.fill is None else number_of(n.fill)
    causal_bias, causal_fill = is_causal_mask(n.bias), is_causal_mask(n.mask) and fill_number == -math.inf
    bias, mask = None if causal_bias else bias, None if causal_fill else mask
    return Call(ScoreOptions, n.scale, bias, mask, fill, causal=causal_bias or causal_fill, safe=bool(n.safe))


def _must_be_contiguous(n: NodeView) -> bool:
    """Return whether y needs eager's strides because it is an output of the module."""
    return bool(n.y.is_graph_output())


def _lower_compiled(n: NodeView, q: Any, k: Any, v: Any, *masks: Any) -> Call:
    return Call(attend_compiled, q, k, v, _compiled_scores(n, *masks), _must_be_contiguous(n))


def _lower_dropout_compiled(n: NodeView, *inputs: Any) -> Call:
    q, k, v, *masks, _, _ = inputs
    return Call(
        attend_dropout_compiled, q, k, v, _compiled_scores(n, *masks), _must_be_contiguous(n), *dropout_arguments(n)
    )


def _lower_grad_compiled(n: NodeView, *inputs: Any) -> Call:
    dy, q, k, v, *masks, _, p, dropout_mask, _ = inputs
    return Call(
        attend_backward_compiled, dy, q, k, v, _compiled_scores(n, *masks), p, dropout_mask,
        bool(n.output_dscores), *grad_dropout_arguments(n),
    )  # fmt: skip


def _compiled_bytes(n: NodeView) -> dict[str, sizes.Size]:
    """Return the bytes of the logsumexp and the key, which replace the probabilities and the dropout mask."""
    library = compiled_kernels.library_for_value(n.q)
    if library is None or not library.wait():
        return {}
    rows = sizes.multiply(1, *sizes.dims_of(n.q)[:3])
    return {"probabilities": sizes.multiply(rows, int(score_dtype(dtype_of(n.q)).itemsize)), "dropout_mask": KEY_BYTES}


# The compiled kernels come first: forward and backward of [16, 12, 128, 32] with dropout take 10.7 ms, PyTorch's 14.3.
_KERNELS = (
    Kernel(lower=_lower_compiled, accepts_scalars=True, applies=may_compile, output_bytes=_compiled_bytes),
    Kernel(lower=_lower, accepts_scalars=True),
)
_DROPOUT_KERNELS = (
    Kernel(
        lower=_lower_dropout_compiled, accepts_scalars=True, applies=dropout_may_compile, output_bytes=_compiled_bytes
    ),
    Kernel(lower=_lower_dropout, accepts_scalars=True),
)


def _define(dropout: bool) -> OpDef:
    return define_attention(
        _NAME,
        _OPERANDS,
        _SAVED,
        dropout=dropout,
        types=_dropout_types if dropout else _types,
        body=_dropout_body if dropout else _body,
        gradient=_gradient,
        nondiff_operands=frozenset({"fill"}),
        kernels=_DROPOUT_KERNELS if dropout else _KERNELS,
        axes=_axes,
        columns=lambda n: sizes.dims_of(n.k)[2],
        attributes=_ATTRIBUTES,
    )


ATTENTION = _define(dropout=False)
ATTENTION_DROPOUT = _define(dropout=True)
ATTENTION_GRAD = define_attention_grad(
    _NAME,
    _OPERANDS,
    _SAVED,
    fourth_gradient="dscores",
    types=_grad_types,
    body=_grad_body,
    kernels=(
        Kernel(lower=_lower_grad_compiled, accepts_scalars=True, applies=may_compile),
        Kernel(lower=_lower_grad, accepts_scalars=True),
    ),
    axes=_grad_axes,
    columns=lambda n: sizes.dims_of(n.k)[2],
    attributes=_ATTRIBUTES,
)
