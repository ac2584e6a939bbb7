"""Attention of sequences that lie one after another, without padding between them.

    VarlenAttention(q[t, h, e], k[u, g, e], v[u, g, d], cu_q[n + 1], cu_k[n + 1], bias?[h, l, s]) -> y[t, h, d], kept
    VarlenAttentionDropout(.., ratio, training_mode) -> y, kept, noise[h, t, u]
    VarlenAttentionGrad(dy, q, k, v, cu_q, cu_k, bias?, y, kept, noise?, ratio?) -> dq, dk, dv, dbias

Sequence i has the queries q[cu_q[i]:cu_q[i + 1]] and the keys k[cu_k[i]:cu_k[i + 1]], and sees no other's. With
`is_causal` its row r sees its columns up to r. Its bias is bias[:, :rows, :columns]: one table for all, of one or h
heads, as large as the longest sequence. `scale` is 1/√e by default. A row that sees nothing gives 0, and so does a
token behind the last sequence. h is a multiple of g.

`kept` is a vector of what the kernel keeps for backward: ATen's loop the probabilities of one sequence after another,
flash attention its logsumexp, the compiled kernel and the body nothing. Backward computes the probabilities again where
there are none. In the place of the noise a kernel may give a tensor of its own: a vector of one sequence after another,
a key, the state of a GPU's generator.
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
from onnxtrain.graph.values import TensorType, dtype_of, rank_of, type_of
from onnxtrain.ops.attention import compiled
from onnxtrain.ops.attention.definitions import (
    define_attention,
    define_gradient,
    dropout_may_compile,
    drops,
    drops_in_gradient,
)
from onnxtrain.ops.attention.parts import accumulated, dropped, product_gradients, scale_of
from onnxtrain.ops.attention.scores import Packed
from onnxtrain.ops.attention.varlen_compiled import (
    varlen_backward_compiled,
    varlen_compiled,
    varlen_dropout_compiled,
)
from onnxtrain.ops.attention.varlen_flash import (
    flash_runs,
    varlen_backward_flash,
    varlen_dropout_flash,
    varlen_flash,
)
from onnxtrain.ops.attention.varlen_kernels import (
    varlen_attention,
    varlen_attention_backward,
    varlen_attention_dropout,
)
from onnxtrain.ops.composite import no_axes
from onnxtrain.ops.constructors import TORCH_DTYPES, always, cast
from onnxtrain.ops.definition import Call, Kernel, NodeView, OpDef
from onnxtrain.ops.fused import nothing, only_first, total
from onnxtrain.ops.matmul import constant_axes
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.random.dropout import draws_fast, ratio_of, trains
from onnxtrain.ops.registry import definition_of
from onnxtrain.ops.reshape.dims import expanded, transposed, unsqueezed
from onnxtrain.ops.reshape.rows import counting, zeros
from onnxtrain.ops.reshape.shape import reshaped

Tensor = torch.Tensor
Grads = list[ir.Value | None]

_NAME, _KEPT = "VarlenAttention", "kept"
_OPERANDS = ("q", "k", "v", "cu_q", "cu_k", "bias?")
_ATTRIBUTES = {"scale": None, "is_causal": 0}
_INT64 = ir.DataType.INT64


# Types, axes and flops


def _types(n: NodeView) -> Sequence[TensorType]:
    if any(rank_of(x) != 3 for x in (n.q, n.k, n.v)):
        raise GraphError(f"{n.definition.name} takes q, k and v [tokens, heads, size]", got=str(type_of(n.q)))
    if sizes.dims_of(n.cu_q) != sizes.dims_of(n.cu_k) or rank_of(n.cu_q) != 1:
        raise GraphError(
            "there are as many sequences of queries as of keys", got=f"{type_of(n.cu_q)} and {type_of(n.cu_k)}"
        )
    if n.bias is not None and (rank_of(n.bias) != 3 or sizes.dims_of(n.bias)[0] not in (1, sizes.dims_of(n.q)[1])):
        raise GraphError("bias has the axes [heads, rows, columns]", got=str(type_of(n.bias)))
    tokens, heads, _ = sizes.dims_of(n.q)
    y = TensorType(dtype_of(n.q), (tokens, heads, sizes.dims_of(n.v)[2]))
    return y, TensorType(accumulated(dtype_of(n.q)), ("kept_scores",))


def _dropout_types(n: NodeView) -> Sequence[TensorType]:
    if not trains(n):
        raise GraphError("attention's dropout has a known ratio between 0 and 1, and draws", got=str(n.ratio))
    tokens, heads, _ = sizes.dims_of(n.q)
    return *_types(n), TensorType(ir.DataType.BOOL, (heads, tokens, sizes.dims_of(n.k)[0]))


def _head_words(n: NodeView) -> tuple[str, str]:
    return ("h", "h") if sizes.dims_of(n.q)[1] == sizes.dims_of(n.k)[1] else ("[h]", "[g]")


def _axes(n: NodeView) -> str:
    heads, shared = _head_words(n)
    bias = "-" if n.bias is None else f"{heads} [l] [s]"
    operands = [f"[t] {heads} [e]", f"[u] {shared} [e]", f"[u] {shared} d", "[n]", "[n]", bias, "-", "-"]
    results = [f"[t] {heads} d", "[kept]", "[h] [t] [u]"][: len(n.node.outputs)]
    return f"{', '.join(operands[: len(n.node.inputs)])} -> {', '.join(results)}"


def _columns(n: NodeView) -> sizes.Size:
    """As if sequences were of equal length: how long each is, is not known before the graph runs."""
    sequences = sizes.maximum(1, sizes.subtract(sizes.dims_of(n.cu_k)[0], 1))
    return sizes.floor_divide(sizes.dims_of(n.k)[0], sequences)


# Bodies: all tokens together, with a mask of those that belong to one sequence


def _places(op: Builder, cu: ir.Value, tokens: sizes.Size) -> tuple[ir.Value, ir.Value]:
    """For each token the number of its sequence, and its place there."""
    cu = cast(op, cu, _INT64)
    ends = op.Slice(cu, constant_axes(op, 1), op.sizes([sizes.dims_of(cu)[0]]), constant_axes(op, 0))
    token = counting(op, tokens)
    over = op.GreaterOrEqual(unsqueezed(op, token, 1), unsqueezed(op, ends, 0))
    sequence = op.ReduceSum(op.Cast(over, to=_INT64), constant_axes(op, 1), keepdims=0)
    return sequence, op.Sub(token, op.Gather(cu, sequence, axis=0))


def _seen(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value]:
    """Which column each row sees [t, u], and the number of its element in a table [l * s]."""
    (row_of, row), (column_of, column) = (
        _places(op, cu, sizes.dims_of(x)[0]) for cu, x in ((n.cu_q, n.q), (n.cu_k, n.k))
    )
    row_of, row = unsqueezed(op, row_of, 1), unsqueezed(op, row, 1)
    count = op.size(sizes.subtract(sizes.dims_of(n.cu_q)[0], 1))
    seen = op.And(op.Equal(row_of, unsqueezed(op, column_of, 0)), op.Less(row_of, count))
    if n.is_causal:
        seen = op.And(seen, op.LessOrEqual(unsqueezed(op, column, 0), row))
    if n.bias is None:
        return seen, row
    place = op.Add(op.Mul(row, op.size(sizes.dims_of(n.bias)[2])), unsqueezed(op, column, 0))
    return seen, op.Where(seen, place, op.scalar(0, _INT64))


def _by_heads(op: Builder, x: ir.Value, heads: sizes.Size, dtype: ir.DataType) -> ir.Value:
    """x[t, g, e] as [h, t, e]."""
    tokens, own, width = sizes.dims_of(x)
    x = transposed(op, cast(op, x, dtype), [1, 0, 2])
    if own == heads:
        return x
    each = sizes.floor_divide(heads, own)
    wide = expanded(op, unsqueezed(op, x, 1), (own, each, tokens, width))
    return reshaped(op, wide, (heads, tokens, width))


def _scores(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value, ir.Value]:
    """q, k and v [h, tokens, size], the masked scores [h, t, u], and the table's element of each."""
    inner, heads = accumulated(dtype_of(n.q)), sizes.dims_of(n.q)[1]
    q, k, v = (_by_heads(op, x, heads, inner) for x in (n.q, n.k, n.v))
    scores = op.Mul(op.MatMul(q, transposed(op, k, [0, 2, 1])), scale_of(op, q, n.scale))
    seen, place = _seen(op, n)
    if n.bias is not None:
        own, rows, columns = sizes.dims_of(n.bias)
        table = reshaped(op, cast(op, n.bias, inner), (own, sizes.multiply(rows, columns)))
        scores = op.Add(scores, op.Gather(table, place, axis=1))
    return q, k, v, op.Where(seen, scores, op.scalar(-math.inf, inner)), place


def _result(op: Builder, n: NodeView, p: ir.Value, v: ir.Value) -> ir.Value:
    return cast(op, transposed(op, op.MatMul(p, v), [1, 0, 2]), dtype_of(n.q))


def _body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    _, _, v, scores, _ = _scores(op, n)
    p, kept = op.own.SafeSoftmax(scores, axis=-1), nothing(op, n.kept)
    if n.definition is VARLEN_ATTENTION:
        return _result(op, n, p, v), kept
    used, noise = op.Dropout(p, n.ratio, n.training_mode)
    return _result(op, n, used, v), kept, noise


def _summed_groups(op: Builder, gradient: ir.Value, x: ir.Value) -> ir.Value:
    """The gradient [h, u, e] of x[u, g, e]."""
    tokens, own, width = sizes.dims_of(x)
    heads = sizes.dims_of(gradient)[0]
    if own != heads:
        gradient = reshaped(op, gradient, (own, sizes.floor_divide(heads, own), tokens, width))
        gradient = total(op, gradient, [1], keepdims=False)
    return cast(op, transposed(op, gradient, [1, 0, 2]), dtype_of(x))


def _grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    q, k, v, scores, place = _scores(op, n)
    inner = dtype_of(scores)
    p = op.own.SafeSoftmax(scores, axis=-1)
    dy = transposed(op, cast(op, n.dy, inner), [1, 0, 2])

    ds = op.ms.SoftmaxGrad_13(dropped(op, n, op.ms.FusedMatMul(dy, v, transB=1)), p, axis=-1)
    dq, dk, dv = product_gradients(op, ds, dropped(op, n, p), dy, q, k, n.scale)
    dq = cast(op, transposed(op, dq, [1, 0, 2]), dtype_of(n.q))
    dk, dv = _summed_groups(op, dk, n.k), _summed_groups(op, dv, n.v)
    return (dq, dk, dv) if len(n.node.outputs) == 3 else (dq, dk, dv, _table_gradient(op, n, ds, place))


def _table_gradient(op: Builder, n: NodeView, ds: ir.Value, place: ir.Value) -> ir.Value:
    """The gradients of the scores added up where bias was read; those of other sequences are 0."""
    own, rows, columns = sizes.dims_of(n.bias)
    if own == 1 and sizes.dims_of(ds)[0] != 1:
        ds = total(op, ds, [0])
    heads, count = sizes.dims_of(ds)[0], sizes.multiply(*sizes.dims_of(ds)[1:])
    places = expanded(op, reshaped(op, place, (1, count)), (heads, count))
    table = zeros(op, (own, sizes.multiply(rows, columns)), dtype_of(ds))
    found = op.ScatterElements(table, places, reshaped(op, ds, (heads, count)), axis=1, reduction="add")
    return cast(op, reshaped(op, found, (own, rows, columns)), dtype_of(n.bias))


# Gradient


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    dy = only_first(n, cotangents)
    noise = getattr(n, "noise", None)
    ratio = None if noise is None else op.scalar(ratio_of(n), ir.DataType.DOUBLE)
    of_bias = n.bias is not None and n.wants("bias")
    found = op.own.VarlenAttentionGrad(
        dy, n.q, n.k, n.v, n.cu_q, n.cu_k, n.bias, n.y, n.kept, noise, ratio,
        scale=n.scale, is_causal=n.is_causal or None, of_bias=int(of_bias) or None,
    )  # fmt: skip
    gradients: Grads = [*found[:3], None, None, found[3] if of_bias else None, None, None]
    return gradients[: len(n.node.inputs)]


def _grad_types(n: NodeView) -> Sequence[TensorType]:
    return [type_of(x) for x in (n.q, n.k, n.v, n.bias)[: len(n.node.outputs)]]


# Kernels


def _packed(n: NodeView, cu_q: Any, cu_k: Any, bias: Any) -> Call:
    return Call(Packed, cu_q, cu_k, n.scale, bias, bool(n.is_causal))


def _lower(n: NodeView, q: Any, k: Any, v: Any, *sequences: Any) -> Call:
    return Call(varlen_attention, q, k, v, _packed(n, *sequences))


def _lower_dropout(n: NodeView, *inputs: Any) -> Call:
    q, k, v, *sequences, _, _ = inputs
    return Call(varlen_attention_dropout, q, k, v, _packed(n, *sequences), ratio_of(n), draws_fast(n))


def _lower_grad(n: NodeView, *inputs: Any) -> Call:
    dy, q, k, v, *sequences, _, kept, noise, _ = inputs
    return Call(
        varlen_attention_backward, dy, q, k, v, _packed(n, *sequences), kept, bool(n.of_bias),
        noise, drops_in_gradient(n)[1],
    )  # fmt: skip


def _lower_compiled(n: NodeView, q: Any, k: Any, v: Any, *sequences: Any) -> Call:
    compiled.request(n.q)
    return Call(varlen_compiled, q, k, v, _packed(n, *sequences))


def _lower_dropout_compiled(n: NodeView, *inputs: Any) -> Call:
    compiled.request(n.q)
    q, k, v, *sequences, _, _ = inputs
    return Call(varlen_dropout_compiled, q, k, v, _packed(n, *sequences), *drops(n))


def _lower_grad_compiled(n: NodeView, *inputs: Any) -> Call:
    compiled.request(n.q)
    dy, q, k, v, *sequences, _, kept, noise, _ = inputs
    return Call(
        varlen_backward_compiled, dy, q, k, v, _packed(n, *sequences), kept, noise, *drops_in_gradient(n)
    )  # fmt: skip


def _lower_flash(n: NodeView, q: Any, k: Any, v: Any, *sequences: Any) -> Call:
    return Call(varlen_flash, q, k, v, _packed(n, *sequences))


def _lower_dropout_flash(n: NodeView, *inputs: Any) -> Call:
    q, k, v, *sequences, _, _ = inputs
    return Call(varlen_dropout_flash, q, k, v, _packed(n, *sequences), ratio_of(n))


def _lower_grad_flash(n: NodeView, *inputs: Any) -> Call:
    dy, q, k, v, *sequences, y, kept, noise, _ = inputs
    ratio = 0.0 if n.noise is None else ratio_of(n)
    return Call(varlen_backward_flash, dy, q, k, v, _packed(n, *sequences), y, kept, noise, ratio)


def _may_compile(n: NodeView, device: str) -> bool:
    """The compiled kernel has no table of biases."""
    return may_compile(n, device) and n.bias is None


def _dropout_may_compile(n: NodeView, device: str) -> bool:
    return _may_compile(n, device) and dropout_may_compile(n, device)


def _may_flash(n: NodeView, device: str) -> bool:
    """PyTorch's flash kernel has no table of biases, and is causal from the last row and column of each sequence."""
    widths = {sizes.dims_of(x)[2] for x in (n.q, n.k, n.v)}
    return (
        n.bias is None
        and (n.cu_q is n.cu_k or not n.is_causal)
        and sizes.dims_of(n.cu_q)[0] not in (0, 1)
        and len(widths) == 1
        and flash_runs(device, TORCH_DTYPES[dtype_of(n.q)], widths.pop())
    )


def _dropout_may_flash(n: NodeView, device: str) -> bool:
    """Where it need not draw what eager does."""
    return _may_flash(n, device) and n.node.metadata_props.get("draws") == "any"


def _grad_may_flash(n: NodeView, device: str) -> bool:
    """Where forward did, which in the place of the noise gives a state that only flash attention reads."""
    if n.noise is None:
        return _may_flash(n, device)
    forward = n.noise.producer()
    drops = forward is not None and definition_of(forward) is VARLEN_ATTENTION_DROPOUT
    return drops and _dropout_may_flash(VARLEN_ATTENTION_DROPOUT.view(forward), device)


_PLAIN = (
    Kernel(lower=_lower_compiled, applies=_may_compile),
    Kernel(lower=_lower_flash, applies=_may_flash),
    Kernel(lower=_lower, synchronizes=always),
)
_WITH_DROPOUT = (
    Kernel(lower=_lower_dropout_compiled, applies=_dropout_may_compile),
    Kernel(lower=_lower_dropout_flash, applies=_dropout_may_flash),
    Kernel(lower=_lower_dropout, synchronizes=always),
)


def _define(dropout: bool) -> OpDef:
    return define_attention(
        _NAME,
        _OPERANDS,
        _KEPT,
        dropout=dropout,
        types=_dropout_types if dropout else _types,
        body=_body,
        gradient=_gradient,
        constants=frozenset({"cu_q", "cu_k"}),
        kernels=_WITH_DROPOUT if dropout else _PLAIN,
        axes=_axes,
        columns=_columns,
        attributes=_ATTRIBUTES,
    )


VARLEN_ATTENTION = _define(dropout=False)
VARLEN_ATTENTION_DROPOUT = _define(dropout=True)
VARLEN_ATTENTION_GRAD = define_gradient(
    _NAME,
    _OPERANDS,
    _KEPT,
    fourth="bias",
    types=_grad_types,
    body=_grad_body,
    kernels=(
        Kernel(lower=_lower_grad_compiled, applies=_may_compile),
        Kernel(lower=_lower_grad_flash, applies=_grad_may_flash),
        Kernel(lower=_lower_grad, synchronizes=always),
    ),
    axes=no_axes,  # a kernel keeps what it likes
    columns=_columns,
    attributes=_ATTRIBUTES,
)
