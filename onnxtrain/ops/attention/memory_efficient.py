"""Attention that saves no probabilities: backward recomputes them, and the dropout mask from a key.

    MemoryEfficientAttention(q[b, h, l, e], k[b, g, s, e], v[b, g, s, d], bias?, mask?, fill?, key?) -> y[b, h, l, d]
    MemoryEfficientAttentionGrad(dy, q, k, v, bias?, mask?, fill?, key?) -> dq, dk, dv, dscores[b, h, l, s]

It computes what ScaledDotProductAttention does (`dense.py`). With a key, a probability is dropped for `dropped` of the
65536 values of its 16 random bits (`ops/random/keyed_bits.py`). The compiled kernel runs once it is ready, PyTorch's
operators until then. Source: Rabe and Staats 2021, https://arxiv.org/abs/2112.05682.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, dtype_of, type_of
from onnxtrain.ops.attention import compiled_kernels
from onnxtrain.ops.attention.constructors import (
    KEYED,
    check_key,
    define_attention,
    define_attention_grad,
    drop_by_key,
    dropout_options,
)
from onnxtrain.ops.attention.dense import (
    ATTRIBUTES,
    OPERANDS,
    READS,
    by_input,
    columns_of,
    gradients_of,
    mask_axes,
    needs_dscores,
    probabilities_of,
    result_type,
    scores_shape,
    times_values,
)
from onnxtrain.ops.attention.dense_aten import attend, attend_backward
from onnxtrain.ops.attention.heads import group_size
from onnxtrain.ops.attention.kernel_arguments import DropoutOptions, ScoreOptions
from onnxtrain.ops.attention.masks import is_causal_mask
from onnxtrain.ops.attention.scores import score_dtype
from onnxtrain.ops.body_parts import reshaped
from onnxtrain.ops.definition import Call, Kernel, NodeView
from onnxtrain.ops.elementwise.arithmetic import number_of
from onnxtrain.ops.gradient_masks import first_cotangent
from onnxtrain.ops.random.keyed_bits import keep_mask_compiled
from onnxtrain.ops.reshape.rows import arange

Tensor = torch.Tensor

_ATTRIBUTES = {**ATTRIBUTES, **KEYED}


# Types, axes, bodies and gradient


def _types(n: NodeView) -> Sequence[TensorType]:
    check_key(n)
    return (result_type(n),)


def _grad_types(n: NodeView) -> Sequence[TensorType]:
    dscores = TensorType(score_dtype(dtype_of(n.q)), scores_shape(n))
    return [type_of(n.q), type_of(n.k), type_of(n.v), dscores][: len(n.node.outputs)]


def _axes(n: NodeView) -> str:
    heads, shared = ("h", "h") if group_size(n.q, n.k) == 1 else ("[h]", "[g]")
    batch, rows = "b", "l"
    if n.key is not None:  # the index of a probability determines whether it is dropped
        batch, heads, shared, rows = "[b]", "[h]", "[g]", "[l]"
    scores = f"{batch} {heads} {rows} [s]"
    operands = [f"{batch} {heads} {rows} [e]", f"{batch} {shared} [s] [e]", f"{batch} {shared} [s] d"]
    operands += [*(mask_axes(x, scores) for x in (n.bias, n.mask)), "-", "-"]
    return f"{', '.join(operands[: len(n.node.inputs)])} -> {batch} {heads} {rows} d"


def _grad_axes(n: NodeView) -> str:
    heads, shared = ("h", "h") if group_size(n.q, n.k) == 1 else ("[h]", "[g]")
    batch = "b"
    if n.key is not None:
        batch, heads, shared = "[b]", "[h]", "[g]"
    q, k, v = f"{batch} {heads} [l] [e]", f"{batch} {shared} [s] [e]", f"{batch} {shared} [s] [d]"
    scores = f"{batch} {heads} [l] [s]"
    operands = [f"{batch} {heads} [l] [d]", q, k, v, *(mask_axes(x, scores) for x in (n.bias, n.mask)), "-", "-"]
    results = [q, k, v, scores][: len(n.node.outputs)]
    return f"{', '.join(operands[: len(n.node.inputs)])} -> {', '.join(results)}"


def _dropped(op: Builder, n: NodeView, x: ir.Value) -> ir.Value:
    """Apply the node's dropout to a tensor of the scores' shape."""
    if n.key is None:
        return x
    shape = sizes.dims_of(x)
    return drop_by_key(op, n, x, reshaped(op, arange(op, sizes.multiply(*shape)), shape))


def _body(op: Builder, n: NodeView) -> ir.Value:
    return times_values(op, n, _dropped(op, n, probabilities_of(op, n)))


def _grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value | None]:
    return gradients_of(op, n, probabilities_of(op, n), lambda x: _dropped(op, n, x))


def _gradient(op: Builder, n: NodeView, dy: ir.Value | None) -> Sequence[ir.Value | None]:
    results = op.own.MemoryEfficientAttentionGrad(
        first_cotangent(n, [dy]), n.q, n.k, n.v, n.bias, n.mask, n.fill, n.key,
        scale=n.scale, safe=n.safe or None, dropped=n.dropped or None, output_dscores=int(needs_dscores(n)) or None,
    )  # fmt: skip
    return by_input(op, n, results)


# Kernels


def memory_efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, scores: ScoreOptions, dropout: DropoutOptions | None, contiguous: bool
) -> Tensor:
    """Return y; with `contiguous`, its memory is as eager's, otherwise it may be in the order [b, l, h, d]."""
    results = compiled_kernels.forward(q, k, v, scores, dropout, contiguous)
    return attend(q, k, v, scores, *_mask_and_scale(q, k, dropout)) if results is None else results[0]


def memory_efficient_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: ScoreOptions,
    dropout: DropoutOptions | None,
    output_dscores: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v and, with `output_dscores`, of the masked scores [b, h, l, s]."""
    gradients = compiled_kernels.backward(dy, q, k, v, scores, dropout, output_dscores)
    if gradients is not None:
        return gradients
    return attend_backward(dy, q, k, v, scores, None, output_dscores, *_mask_and_scale(q, k, dropout))


def _mask_and_scale(q: Tensor, k: Tensor, dropout: DropoutOptions | None) -> tuple[Tensor | None, float]:
    """Return the dropout mask that the compiled kernel samples, bool [b, h, l, s], and the scale of the kept ones."""
    if dropout is None:
        return None, 1.0
    shape = (*q.shape[:3], k.size(2))
    mask = keep_mask_compiled(dropout.key, torch.Size(shape).numel(), dropout.drop_count)
    return mask.view(shape).view(torch.bool), dropout.keep_scale


def _scores(n: NodeView, bias: Any, mask: Any, fill: Any) -> Call:
    """Return the score options of a node; a causal bias or mask becomes the flag `causal`."""
    fill_number = -math.inf if n.fill is None else number_of(n.fill)
    causal_bias = is_causal_mask(n.bias, n.q, n.k)
    causal_fill = is_causal_mask(n.mask, n.q, n.k) and fill_number == -math.inf
    bias, mask = None if causal_bias else bias, None if causal_fill else mask
    return Call(ScoreOptions, n.scale, bias, mask, fill, causal=causal_bias or causal_fill, safe=bool(n.safe))


def _lower(n: NodeView, q: Any, k: Any, v: Any, *others: Any) -> Call:
    compiled_kernels.request(n.q)
    *masks, key = others
    is_output = bool(n.node.outputs[0].is_graph_output())  # of the module: it needs eager's strides
    return Call(memory_efficient_attention, q, k, v, _scores(n, *masks), dropout_options(n, key), is_output)


def _lower_grad(n: NodeView, dy: Any, q: Any, k: Any, v: Any, *others: Any) -> Call:
    compiled_kernels.request(n.q)
    *masks, key = others
    return Call(
        memory_efficient_attention_backward,
        dy,
        q,
        k,
        v,
        _scores(n, *masks),
        dropout_options(n, key),
        bool(n.output_dscores),
    )


MEMORY_EFFICIENT_ATTENTION = define_attention(
    "MemoryEfficientAttention",
    (*OPERANDS, "key?"),
    ("y",),
    reads=(*READS, "key"),
    types=_types,
    body=_body,
    gradient=_gradient,
    nondiff_operands=frozenset({"fill", "key"}),
    kernels=(Kernel(lower=_lower, accepts_scalars=True),),
    axes=_axes,
    columns=columns_of,
    attributes=_ATTRIBUTES,
)
define_attention_grad(
    "MemoryEfficientAttentionGrad",
    (*OPERANDS, "key?"),
    fourth_gradient="dscores",
    types=_grad_types,
    body=_grad_body,
    kernels=(Kernel(lower=_lower_grad, accepts_scalars=True),),
    axes=_grad_axes,
    columns=columns_of,
    attributes=_ATTRIBUTES,
)
