"""Attention as models write it out, with its probabilities kept for backward.

    ScaledDotProductAttention(q[b, h, l, e], k[b, g, s, e], v[b, g, s, d], bias?, mask?, fill?) -> y[b, h, l, d],
                                                                                  probabilities[b, h, l, s]
    ScaledDotProductAttentionDropout(.., ratio, training_mode) -> y, probabilities, noise[b, h, l, s]
    ScaledDotProductAttentionGrad(dy, q, k, v, bias?, mask?, fill?, y, probabilities, noise?, ratio?)
                                                                         -> dq, dk, dv, dscores[b, h, l, s]

    scores = scale * q @ kᵀ + bias, then + mask or, where mask is bool, `fill` (-inf) where it is false
    y = dropout(softmax(scores)) @ v

`scale` is 1/√e by default. bias and mask broadcast to the scores. A row of -inf gives NaN, as Softmax does, or 0 where
`safe` is 1. h is a multiple of g. noise is true where dropout keeps; it draws as `randomness.py` says.

The element types of probabilities and noise are those of the body. A kernel may give a tensor of its own in their
place (a logsumexp, a key): only the kernel of the gradient that belongs to it reads them, and tells them apart.
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
from onnxtrain.ops.attention import compiled
from onnxtrain.ops.attention.definitions import (
    define_attention,
    define_gradient,
    dropout_may_compile,
    drops,
    drops_in_gradient,
)
from onnxtrain.ops.attention.dense_compiled import (
    attend_backward_compiled,
    attend_compiled,
    attend_dropout_compiled,
)
from onnxtrain.ops.attention.dense_kernels import attend, attend_backward, probabilities_type
from onnxtrain.ops.attention.parts import (
    accumulated,
    dropped,
    groups_of,
    hides_later,
    product_gradients,
    repeated,
    scale_of,
    summed_heads,
)
from onnxtrain.ops.attention.scores import Scores
from onnxtrain.ops.constructors import cast
from onnxtrain.ops.definition import Call, Kernel, NodeView, OpDef
from onnxtrain.ops.elementwise.arithmetic import number_of
from onnxtrain.ops.fused import only_first
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.random.dropout import DRAWS, draws_fast, fast_mask, ratio_of, torch_mask, trains
from onnxtrain.ops.random.dropout import scale_of as kept_scale
from onnxtrain.ops.random.keyed_bits import KEY_BYTES

Tensor = torch.Tensor
Grads = list[ir.Value | None]

_NAME, _KEPT = "ScaledDotProductAttention", "probabilities"
_OPERANDS = ("q", "k", "v", "bias?", "mask?", "fill?")
_ATTRIBUTES = {"scale": None, "safe": 0}


# Types, axes and flops


def _scores_shape(n: NodeView) -> Sizes:
    if any(rank_of(x) != 4 for x in (n.q, n.k, n.v)):
        raise GraphError(f"{n.definition.name} takes q, k and v of four dimensions", got=f"q{list(sizes.dims_of(n.q))}")
    shape = (*sizes.dims_of(n.q)[:3], sizes.dims_of(n.k)[2])
    for name, value in (("bias", n.bias), ("mask", n.mask)):
        if value is not None and (rank_of(value) > 4 or sizes.broadcast(shape, sizes.dims_of(value)) != shape):
            raise GraphError(f"the {name} broadcasts to the scores", expected=str(list(shape)), got=str(type_of(value)))
    if n.bias is not None and not is_float(dtype_of(n.bias)):
        raise GraphError("the bias is added to the scores", got=dtype_of(n.bias).name)
    return shape


def _types(n: NodeView) -> Sequence[TensorType]:
    shape = _scores_shape(n)
    y = TensorType(dtype_of(n.q), (*shape[:3], sizes.dims_of(n.v)[3]))
    return y, TensorType(accumulated(dtype_of(n.q)), shape)


def _dropout_types(n: NodeView) -> Sequence[TensorType]:
    if not trains(n):
        raise GraphError("attention's dropout has a known ratio between 0 and 1, and draws", got=str(n.ratio))
    return *_types(n), TensorType(ir.DataType.BOOL, _scores_shape(n))


def _words(n: NodeView, x: ir.Value | None, axes: str) -> str:
    return "-" if x is None else " ".join(axes.split()[4 - rank_of(x) :])


def _axes(n: NodeView) -> str:
    heads, shared = ("h", "h") if groups_of(n.q, n.k) == 1 else ("[h]", "[g]")
    scores = f"b {heads} l [s]"
    masks = [_words(n, x, scores) for x in (n.bias, n.mask)]
    operands = [f"b {heads} l [e]", f"b {shared} [s] [e]", f"b {shared} [s] d", *masks]
    operands += ["-"] * (len(n.node.inputs) - len(operands))
    results = [f"b {heads} l d", *[scores] * (len(n.node.outputs) - 1)]
    return f"{', '.join(operands[: len(n.node.inputs)])} -> {', '.join(results)}"


def _grad_axes(n: NodeView) -> str:
    heads, shared = ("h", "h") if groups_of(n.q, n.k) == 1 else ("[h]", "[g]")
    q, k, v, scores = f"b {heads} [l] [e]", f"b {shared} [s] [e]", f"b {shared} [s] [d]", f"b {heads} [l] [s]"
    y = f"b {heads} [l] [d]"
    masks = [_words(n, x, scores) for x in (n.bias, n.mask)]
    operands = [y, q, k, v, *masks, "-", y, scores, "-" if n.noise is None else scores, "-"]
    results = [q, k, v, scores][: len(n.node.outputs)]
    return f"{', '.join(operands[: len(n.node.inputs)])} -> {', '.join(results)}"


# Bodies


def _probabilities(op: Builder, n: NodeView) -> ir.Value:
    inner = accumulated(dtype_of(n.q))
    q, k = cast(op, n.q, inner), repeated(op, cast(op, n.k, inner), groups_of(n.q, n.k))
    scores = op.Mul(op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), scale_of(op, q, n.scale))
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
    v = repeated(op, cast(op, n.v, dtype_of(p)), groups_of(n.q, n.v))
    return cast(op, op.MatMul(p, v), dtype_of(n.q))


def _body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    p = _probabilities(op, n)
    return _times_values(op, n, p), p


def _dropout_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    p = _probabilities(op, n)
    used, noise = op.Dropout(p, n.ratio, n.training_mode)
    return _times_values(op, n, used), p, noise


def _grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value | None]:
    p = n.probabilities
    inner, groups = dtype_of(p), groups_of(n.q, n.k)
    q, dy = cast(op, n.q, inner), cast(op, n.dy, inner)
    k, v = (repeated(op, cast(op, x, inner), groups) for x in (n.k, n.v))

    ds = op.ms.SoftmaxGrad_13(dropped(op, n, op.ms.FusedMatMul(dy, v, transB=1)), p, axis=-1)
    if n.mask is not None and dtype_of(n.mask) == ir.DataType.BOOL:
        ds = op.Where(n.mask, ds, op.scalar(0.0, inner))
    dq, dk, dv = product_gradients(op, ds, dropped(op, n, p), dy, q, k, n.scale)
    dq, dk, dv = cast(op, dq, dtype_of(n.q)), summed_heads(op, dk, n.k), summed_heads(op, dv, n.v)
    return (dq, dk, dv, ds)[: len(n.node.outputs)]


# Gradient


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    if cotangents[0] is None:
        return [None] * len(n.node.inputs)
    dy = only_first(n, cotangents)
    noise = getattr(n, "noise", None)
    of_mask = n.mask is not None and is_float(dtype_of(n.mask)) and n.wants("mask")
    of_scores = of_mask or (n.bias is not None and n.wants("bias"))
    ratio = None if noise is None else op.scalar(ratio_of(n), ir.DataType.DOUBLE)
    found = op.own.ScaledDotProductAttentionGrad(
        dy, n.q, n.k, n.v, n.bias, n.mask, n.fill, n.y, n.probabilities, noise, ratio,
        scale=n.scale, safe=n.safe or None, of_scores=int(of_scores) or None,
    )  # fmt: skip
    gradients: Grads = [*found[:3], None, None, None, None, None]
    if n.bias is not None and n.wants("bias"):
        gradients[3] = cast(op, found[3], dtype_of(n.bias))
    if of_mask:
        gradients[4] = cast(op, found[3], dtype_of(n.mask))
    return gradients[: len(n.node.inputs)]


def _grad_types(n: NodeView) -> Sequence[TensorType]:
    return [type_of(n.q), type_of(n.k), type_of(n.v), type_of(n.probabilities)][: len(n.node.outputs)]


# Kernels


def attend_dropout(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, ratio: float, fast: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend` with dropout; the noise is drawn at once for all heads, as Dropout draws for their probabilities."""
    like = torch.empty((*q.shape[:3], k.size(2)), dtype=torch.bool, device=q.device)
    noise = fast_mask(like, round(ratio * DRAWS)) if fast else torch_mask(like, 1 - ratio)
    y, p = attend(q, k, v, scores, noise, kept_scale(ratio, probabilities_type(q)))
    return y, p, noise


def _scores(n: NodeView, bias: Any, mask: Any, fill: Any) -> Call:
    return Call(Scores, n.scale, bias, mask, fill, safe=bool(n.safe))


def _lower(n: NodeView, q: Any, k: Any, v: Any, *masks: Any) -> Call:
    return Call(attend, q, k, v, _scores(n, *masks))


def _lower_dropout(n: NodeView, *inputs: Any) -> Call:
    q, k, v, *masks, _, _ = inputs
    return Call(attend_dropout, q, k, v, _scores(n, *masks), ratio_of(n), draws_fast(n))


def _lower_grad(n: NodeView, *inputs: Any) -> Call:
    dy, q, k, v, *masks, _, p, noise, _ = inputs
    return Call(attend_backward, dy, q, k, v, _scores(n, *masks), p, bool(n.of_scores), noise, drops_in_gradient(n)[1])


def _scores_compiled(n: NodeView, bias: Any, mask: Any, fill: Any) -> Call:
    """As the compiled kernel takes them: without a bias or mask that only says that they are causal."""
    compiled.request(n.q)
    number = -math.inf if n.fill is None else number_of(n.fill)
    early = [hides_later(n.bias), hides_later(n.mask) and number == -math.inf]
    bias, mask = None if early[0] else bias, None if early[1] else mask
    return Call(Scores, n.scale, bias, mask, fill, causal=any(early), safe=bool(n.safe))


def _leaves(n: NodeView) -> bool:
    """Whether the user sees y's strides."""
    return bool(n.y.is_graph_output())


def _lower_compiled(n: NodeView, q: Any, k: Any, v: Any, *masks: Any) -> Call:
    return Call(attend_compiled, q, k, v, _scores_compiled(n, *masks), _leaves(n))


def _lower_dropout_compiled(n: NodeView, *inputs: Any) -> Call:
    q, k, v, *masks, _, _ = inputs
    return Call(attend_dropout_compiled, q, k, v, _scores_compiled(n, *masks), _leaves(n), *drops(n))


def _lower_grad_compiled(n: NodeView, *inputs: Any) -> Call:
    dy, q, k, v, *masks, _, p, noise, _ = inputs
    return Call(
        attend_backward_compiled, dy, q, k, v, _scores_compiled(n, *masks), p, noise,
        bool(n.of_scores), *drops_in_gradient(n),
    )  # fmt: skip


def _compiled_bytes(n: NodeView) -> dict[str, sizes.Size]:
    """The logsumexp in the place of the probabilities, and the key in that of the noise."""
    library = compiled.library_for(n.q)
    if library is None or not library.wait():
        return {}
    rows = sizes.multiply(1, *sizes.dims_of(n.q)[:3])
    return {"probabilities": sizes.multiply(rows, int(accumulated(dtype_of(n.q)).itemsize)), "noise": KEY_BYTES}


# The compiled kernels come first: forward and backward of [16, 12, 128, 32] with dropout take 10.7 ms, PyTorch's 14.3.
_PLAIN = (
    Kernel(lower=_lower_compiled, accepts_scalars=True, applies=may_compile, output_bytes=_compiled_bytes),
    Kernel(lower=_lower, accepts_scalars=True),
)
_WITH_DROPOUT = (
    Kernel(
        lower=_lower_dropout_compiled, accepts_scalars=True, applies=dropout_may_compile, output_bytes=_compiled_bytes
    ),
    Kernel(lower=_lower_dropout, accepts_scalars=True),
)


def _define(dropout: bool) -> OpDef:
    return define_attention(
        _NAME,
        _OPERANDS,
        _KEPT,
        dropout=dropout,
        types=_dropout_types if dropout else _types,
        body=_dropout_body if dropout else _body,
        gradient=_gradient,
        constants=frozenset({"fill"}),
        kernels=_WITH_DROPOUT if dropout else _PLAIN,
        axes=_axes,
        columns=lambda n: sizes.dims_of(n.k)[2],
        attributes=_ATTRIBUTES,
    )


ATTENTION = _define(dropout=False)
ATTENTION_DROPOUT = _define(dropout=True)
ATTENTION_GRAD = define_gradient(
    _NAME,
    _OPERANDS,
    _KEPT,
    fourth="scores",
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
