"""Attention of packed sequences, which are concatenated without padding.

    VarlenAttention(q[t, h, e], k[u, g, e], v[u, g, d], cu_seqlens_q[n + 1], cu_seqlens_k[n + 1], bias?[h, l, s], key?)
        -> y[t, h, d]
    VarlenAttentionGrad(dy, q, k, v, cu_seqlens_q, cu_seqlens_k, bias?, key?) -> dq, dk, dv, dbias

Sequence i has the queries q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]] and the keys k[cu_seqlens_k[i]:cu_seqlens_k[i + 1]];
it attends to no other sequence. With `is_causal`, row r of a sequence attends to its columns 0 to r. All sequences
share one bias of 1 or h heads, as large as the longest sequence: bias[:, :rows, :columns] is added to the scores of
each. `scale` is 1/√e by default. y is 0 for a row that attends to nothing, and for a token after the last sequence. h
is a multiple of g.

Backward recomputes the probabilities. With a key, a probability is dropped for `dropped` of the 65536 values of its 16
random bits (`ops/random/keyed_bits.py`); scores are numbered sequence by sequence, each [h, l, s].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, dtype_of, rank_of, type_of
from onnxtrain.graph.verify import format_type
from onnxtrain.ops.attention import compiled_kernels
from onnxtrain.ops.attention.constructors import (
    KEYED,
    check_key,
    define_attention,
    define_attention_grad,
    drop_by_key,
    dropout_options,
)
from onnxtrain.ops.attention.kernel_arguments import DropoutOptions, PackedSequences
from onnxtrain.ops.attention.scores import check_operand_ranks, matmul_gradients, scale_value, score_dtype
from onnxtrain.ops.attention.varlen_aten import score_count, varlen_attention, varlen_attention_backward
from onnxtrain.ops.body_parts import cast, reshaped, sum_over
from onnxtrain.ops.constructors import always, no_axes
from onnxtrain.ops.definition import Call, Kernel, NodeView
from onnxtrain.ops.gradient_masks import first_cotangent
from onnxtrain.ops.matmul import constant_axes
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.random.keyed_bits import keep_mask_compiled
from onnxtrain.ops.reshape.dims import expanded, transposed, unsqueezed
from onnxtrain.ops.reshape.rows import arange, zeros
from onnxtrain.ops.reshape.slicing import sliced

Tensor = torch.Tensor

OPERANDS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
ATTRIBUTES = {"scale": None, "is_causal": 0}
_INT64 = ir.DataType.INT64


# Types, axes and flops


def result_type(n: NodeView) -> TensorType:
    check_operand_ranks(n, 3)
    tokens, heads, _ = sizes.dims_of(n.q)
    if sizes.dims_of(n.cu_seqlens_q) != sizes.dims_of(n.cu_seqlens_k) or rank_of(n.cu_seqlens_q) != 1:
        raise GraphError(
            f"cu_seqlens_q and cu_seqlens_k of {n.definition.name} are not vectors of the same length",
            expected="one offset per sequence and the end of the last one, in both",
            got=f"{format_type(type_of(n.cu_seqlens_q))} and {format_type(type_of(n.cu_seqlens_k))}",
        )
    return TensorType(dtype_of(n.q), (tokens, heads, sizes.dims_of(n.v)[2]))


def _types(n: NodeView) -> Sequence[TensorType]:
    result, heads = result_type(n), sizes.dims_of(n.q)[1]
    if n.bias is not None and (rank_of(n.bias) != 3 or sizes.dims_of(n.bias)[0] not in (1, heads)):
        raise GraphError(
            f"the bias of {n.definition.name} has the wrong shape",
            expected=f"[heads, rows, columns] with 1 or {heads} heads",
            got=format_type(type_of(n.bias)),
        )
    check_key(n)
    return (result,)


def operand_axes(n: NodeView) -> tuple[list[str], str]:
    """Return the axes of q, k, v and the offsets, and y's axis of heads.

    Heads pass through if each has its own k and v, unless the index of a probability decides whether it is dropped.
    """
    is_own = sizes.dims_of(n.q)[1] == sizes.dims_of(n.k)[1] and getattr(n, "key", None) is None
    heads, shared = ("h", "h") if is_own else ("[h]", "[g]")
    return [f"[t] {heads} [e]", f"[u] {shared} [e]", f"[u] {shared} d", "[n]", "[n]"], heads


def _axes(n: NodeView) -> str:
    operands, heads = operand_axes(n)
    operands += ["-" if n.bias is None else f"{heads} [l] [s]", "-"]
    return f"{', '.join(operands[: len(n.node.inputs)])} -> [t] {heads} d"


def columns_of(n: NodeView) -> sizes.Size:
    """Return the columns of a row if all sequences had the same length: the lengths are known at run time only."""
    sequences = sizes.maximum(1, sizes.subtract(sizes.dims_of(n.cu_seqlens_k)[0], 1))
    return sizes.floor_divide(sizes.dims_of(n.k)[0], sequences)


# Bodies: the scores of all tokens with all tokens, masked where two tokens belong to different sequences


class _Pairs(NamedTuple):
    """Which tokens attend to each other.

    Attributes:
        visible: whether a row attends to a column, bool [t, u].
        row, column: the position of each row and column in its sequence, [t, 1] and [1, u].
        sequence: of each row, [t, 1]; the number of sequences for a row behind the last.
    """

    visible: ir.Value
    row: ir.Value
    column: ir.Value
    sequence: ir.Value


def _sequence_and_position(op: Builder, cu_seqlens: ir.Value, tokens: sizes.Size) -> tuple[ir.Value, ir.Value]:
    """Return for each token the index of its sequence, and its position in the sequence."""
    cu_seqlens = cast(op, cu_seqlens, _INT64)
    length = op.sizes([sizes.dims_of(cu_seqlens)[0]])
    ends = op.Slice(cu_seqlens, constant_axes(op, 1), length, constant_axes(op, 0))
    token = arange(op, tokens)
    is_past_end = op.GreaterOrEqual(unsqueezed(op, token, 1), unsqueezed(op, ends, 0))
    sequence = op.ReduceSum(op.Cast(is_past_end, to=_INT64), constant_axes(op, 1), keepdims=0)
    return sequence, op.Sub(token, op.Gather(cu_seqlens, sequence, axis=0))


def _pairs(op: Builder, n: NodeView) -> _Pairs:
    (row_sequence, row), (column_sequence, column) = (
        _sequence_and_position(op, cu_seqlens, sizes.dims_of(x)[0])
        for cu_seqlens, x in ((n.cu_seqlens_q, n.q), (n.cu_seqlens_k, n.k))
    )
    row_sequence, row = unsqueezed(op, row_sequence, 1), unsqueezed(op, row, 1)
    column_sequence, column = unsqueezed(op, column_sequence, 0), unsqueezed(op, column, 0)
    sequences = op.size(sizes.subtract(sizes.dims_of(n.cu_seqlens_q)[0], 1))
    visible = op.And(op.Equal(row_sequence, column_sequence), op.Less(row_sequence, sequences))
    if n.is_causal:
        visible = op.And(visible, op.LessOrEqual(column, row))
    return _Pairs(visible, row, column, row_sequence)


def _bias_index(op: Builder, n: NodeView, pairs: _Pairs) -> ir.Value:
    """Return the index of each score's bias in bias[h, l * s]."""
    index = op.Add(op.Mul(pairs.row, op.size(sizes.dims_of(n.bias)[2])), pairs.column)
    return op.Where(pairs.visible, index, op.scalar(0, _INT64))


def score_index(op: Builder, n: NodeView, pairs: _Pairs) -> ir.Value:
    """Return the index of each score [h, t, u] among those of one sequence after another, each [h, l, s].

    It is any number for two tokens of different sequences.
    """
    heads, count = sizes.dims_of(n.q)[1], sizes.dims_of(n.cu_seqlens_q)[0]
    last, zero = sizes.subtract(count, 1), op.constant([0], _INT64)
    lengths = []
    for cu_seqlens in (n.cu_seqlens_q, n.cu_seqlens_k):
        offsets = cast(op, cu_seqlens, _INT64)
        length = op.Sub(sliced(op, offsets, 0, 1, count), sliced(op, offsets, 0, 0, last))
        lengths.append(op.Concat(length, zero, axis=0))  # of a row behind the last sequence: 0
    rows, columns = lengths
    scores = op.Mul(op.Mul(rows, columns), op.size(heads))
    start = op.CumSum(scores, op.scalar(0, _INT64), exclusive=1)
    start, rows, columns = (op.Gather(x, pairs.sequence, axis=0) for x in (start, rows, columns))
    head = unsqueezed(op, arange(op, heads), 1, 2)
    line = op.Add(op.Mul(head, rows), pairs.row)
    return op.Add(op.Add(op.Mul(line, columns), pairs.column), start)


def _heads_first(op: Builder, x: ir.Value, heads: sizes.Size, dtype: ir.DataType) -> ir.Value:
    """Return x[t, g, e] as [h, t, e], each head repeated for the heads of q that share it."""
    tokens, x_heads, width = sizes.dims_of(x)
    x = transposed(op, cast(op, x, dtype), [1, 0, 2])
    if x_heads == heads:
        return x
    group = sizes.floor_divide(heads, x_heads)
    repeated = expanded(op, unsqueezed(op, x, 1), (x_heads, group, tokens, width))
    return reshaped(op, repeated, (heads, tokens, width))


class Scores(NamedTuple):
    """q, k and v [h, tokens, size] in the scores' type, and the masked scores [h, t, u]."""

    q: ir.Value
    k: ir.Value
    v: ir.Value
    masked: ir.Value
    pairs: _Pairs


def scores_of(op: Builder, n: NodeView, bias: ir.Value | None = None) -> Scores:
    inner, heads = score_dtype(dtype_of(n.q)), sizes.dims_of(n.q)[1]
    q, k, v = (_heads_first(op, x, heads, inner) for x in (n.q, n.k, n.v))
    scores = op.Mul(op.MatMul(q, transposed(op, k, [0, 2, 1])), scale_value(op, q, n.scale))
    pairs = _pairs(op, n)
    if bias is not None:
        bias_heads, rows, columns = sizes.dims_of(bias)
        flat_bias = reshaped(op, cast(op, bias, inner), (bias_heads, sizes.multiply(rows, columns)))
        scores = op.Add(scores, op.Gather(flat_bias, _bias_index(op, n, pairs), axis=1))
    return Scores(q, k, v, op.Where(pairs.visible, scores, op.scalar(-math.inf, inner)), pairs)


def times_values(op: Builder, n: NodeView, p: ir.Value, v: ir.Value) -> ir.Value:
    return cast(op, transposed(op, op.MatMul(p, v), [1, 0, 2]), dtype_of(n.q))


def _dropped(op: Builder, n: NodeView, x: ir.Value, pairs: _Pairs) -> ir.Value:
    """Apply the node's dropout to x[h, t, u]."""
    return x if n.key is None else drop_by_key(op, n, x, score_index(op, n, pairs))


def _body(op: Builder, n: NodeView) -> ir.Value:
    scores = scores_of(op, n, n.bias)
    p = op.own.SafeSoftmax(scores.masked, axis=-1)
    return times_values(op, n, _dropped(op, n, p, scores.pairs), scores.v)


def _sum_over_groups(op: Builder, gradient: ir.Value, x: ir.Value) -> ir.Value:
    """Return the gradient of x[u, g, e] from the gradients [h, u, e] of its repeated heads."""
    tokens, x_heads, width = sizes.dims_of(x)
    heads = sizes.dims_of(gradient)[0]
    if x_heads != heads:
        gradient = reshaped(op, gradient, (x_heads, sizes.floor_divide(heads, x_heads), tokens, width))
        gradient = sum_over(op, gradient, [1], keepdims=False)
    return cast(op, transposed(op, gradient, [1, 0, 2]), dtype_of(x))


def gradients_of(
    op: Builder, n: NodeView, scores: Scores, drop: Callable[[ir.Value], ir.Value]
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Return dq, dk, dv and the gradient of the scores [h, t, u]; `drop` applies dropout to such a tensor."""
    p = op.own.SafeSoftmax(scores.masked, axis=-1)
    dy = transposed(op, cast(op, n.dy, dtype_of(p)), [1, 0, 2])
    ds = op.ms.SoftmaxGrad_13(drop(op.ms.FusedMatMul(dy, scores.v, transB=1)), p, axis=-1)
    dq, dk, dv = matmul_gradients(op, ds, drop(p), dy, scores.q, scores.k, n.scale)
    dq = cast(op, transposed(op, dq, [1, 0, 2]), dtype_of(n.q))
    return dq, _sum_over_groups(op, dk, n.k), _sum_over_groups(op, dv, n.v), ds


def _grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    scores = scores_of(op, n, n.bias)
    *gradients, ds = gradients_of(op, n, scores, lambda x: _dropped(op, n, x, scores.pairs))
    if len(n.node.outputs) == 3:
        return gradients
    return (*gradients, _bias_gradient(op, n, ds, _bias_index(op, n, scores.pairs)))


def _bias_gradient(op: Builder, n: NodeView, ds: ir.Value, bias_index: ir.Value) -> ir.Value:
    """Scatter-add the gradients of the scores to the bias; masked scores have a gradient of 0."""
    bias_heads, rows, columns = sizes.dims_of(n.bias)
    if bias_heads == 1 and sizes.dims_of(ds)[0] != 1:
        ds = sum_over(op, ds, [0])
    heads, count = sizes.dims_of(ds)[0], sizes.multiply(*sizes.dims_of(ds)[1:])
    indices = expanded(op, reshaped(op, bias_index, (1, count)), (heads, count))
    dbias = zeros(op, (bias_heads, sizes.multiply(rows, columns)), dtype_of(ds))
    dbias = op.ScatterElements(dbias, indices, reshaped(op, ds, (heads, count)), axis=1, reduction="add")
    return cast(op, reshaped(op, dbias, (bias_heads, rows, columns)), dtype_of(n.bias))


# Gradient


def _gradient(op: Builder, n: NodeView, dy: ir.Value | None) -> Sequence[ir.Value | None]:
    output_dbias = n.bias is not None and n.wants("bias")
    results = op.own.VarlenAttentionGrad(
        first_cotangent(n, [dy]), n.q, n.k, n.v, n.cu_seqlens_q, n.cu_seqlens_k, n.bias, n.key,
        scale=n.scale, is_causal=n.is_causal or None, dropped=n.dropped or None,
        output_dbias=int(output_dbias) or None,
    )  # fmt: skip
    gradients = [*results[:3], None, None, results[3] if output_dbias else None, None]
    return gradients[: len(n.node.inputs)]


def _grad_types(n: NodeView) -> Sequence[TensorType]:
    return [type_of(x) for x in (n.q, n.k, n.v, n.bias)[: len(n.node.outputs)]]


# Kernels


def by_sequence(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, dropout: DropoutOptions | None) -> Tensor:
    """Return y, by a loop over the sequences."""
    return varlen_attention(q, k, v, packed, *_mask_and_scale(q, packed, dropout))


def by_sequence_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequences,
    dropout: DropoutOptions | None,
    output_dbias: bool = False,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v and, with `output_dbias`, of the bias, by a loop over the sequences."""
    return varlen_attention_backward(dy, q, k, v, packed, output_dbias, *_mask_and_scale(q, packed, dropout))


def compiled(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, dropout: DropoutOptions | None) -> Tensor:
    """Return y, by the compiled kernel once it is ready."""
    y = compiled_kernels.forward_varlen(q, k, v, packed, dropout)
    return by_sequence(q, k, v, packed, dropout) if y is None else y


def compiled_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, dropout: DropoutOptions | None
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, by the compiled kernel once it is ready."""
    gradients = compiled_kernels.backward_varlen(dy, q, k, v, packed, dropout)
    return by_sequence_backward(dy, q, k, v, packed, dropout) if gradients is None else gradients


def _mask_and_scale(q: Tensor, packed: PackedSequences, dropout: DropoutOptions | None) -> tuple[Tensor | None, float]:
    return (None, 1.0) if dropout is None else (dropout_mask(q, packed, dropout), dropout.keep_scale)


def dropout_mask(q: Tensor, packed: PackedSequences, dropout: DropoutOptions) -> Tensor:
    """Return the mask that the compiled kernel samples from a key: a bool vector, sequence by sequence."""
    mask = keep_mask_compiled(dropout.key.cpu(), score_count(packed, q.size(1)), dropout.drop_count)
    return mask.view(torch.bool).to(q.device)


def _packed_sequences(n: NodeView, cu_seqlens_q: Any, cu_seqlens_k: Any, bias: Any) -> Call:
    return Call(PackedSequences, cu_seqlens_q, cu_seqlens_k, n.scale, bias, bool(n.is_causal))


def _lower(n: NodeView, q: Any, k: Any, v: Any, *others: Any) -> Call:
    *sequences, key = others
    return Call(by_sequence, q, k, v, _packed_sequences(n, *sequences), dropout_options(n, key))


def _lower_grad(n: NodeView, dy: Any, q: Any, k: Any, v: Any, *others: Any) -> Call:
    *sequences, key = others
    packed = _packed_sequences(n, *sequences)
    return Call(by_sequence_backward, dy, q, k, v, packed, dropout_options(n, key), bool(n.output_dbias))


def _lower_compiled(n: NodeView, q: Any, k: Any, v: Any, *others: Any) -> Call:
    compiled_kernels.request(n.q)
    *sequences, key = others
    return Call(compiled, q, k, v, _packed_sequences(n, *sequences), dropout_options(n, key))


def _lower_grad_compiled(n: NodeView, dy: Any, q: Any, k: Any, v: Any, *others: Any) -> Call:
    compiled_kernels.request(n.q)
    *sequences, key = others
    return Call(compiled_backward, dy, q, k, v, _packed_sequences(n, *sequences), dropout_options(n, key))


def _may_compile(n: NodeView, device: str) -> bool:
    """Return whether the compiled kernel may run a node: it does not support a bias."""
    return may_compile(n, device) and n.bias is None


define_attention(
    "VarlenAttention",
    (*OPERANDS, "bias?", "key?"),
    ("y",),
    reads=(*OPERANDS, "bias", "key"),
    types=_types,
    body=_body,
    gradient=_gradient,
    nondiff_operands=frozenset({"cu_seqlens_q", "cu_seqlens_k", "key"}),
    kernels=(Kernel(lower=_lower_compiled, applies=_may_compile), Kernel(lower=_lower, synchronizes=always)),
    axes=_axes,
    columns=columns_of,
    attributes={**ATTRIBUTES, **KEYED},
)
define_attention_grad(
    "VarlenAttentionGrad",
    (*OPERANDS, "bias?", "key?"),
    fourth_gradient="dbias",
    types=_grad_types,
    body=_grad_body,
    kernels=(Kernel(lower=_lower_grad_compiled, applies=_may_compile), Kernel(lower=_lower_grad, synchronizes=always)),
    axes=no_axes,
    columns=columns_of,
    attributes={**ATTRIBUTES, **KEYED},
)
