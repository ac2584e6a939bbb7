"""Attention of packed sequences, which are concatenated without padding.

    VarlenAttention(q[t, h, e], k[u, g, e], v[u, g, d], cu_seqlens_q[n + 1], cu_seqlens_k[n + 1], bias?[h, l, s])
        -> y[t, h, d], saved
    VarlenAttentionDropout(.., ratio, training_mode) -> y, saved, dropout_mask[h, t, u]
    VarlenAttentionGrad(dy, q, k, v, cu_seqlens_q, cu_seqlens_k, bias?, y, saved, dropout_mask?, ratio?)
        -> dq, dk, dv, dbias

Sequence i has the queries q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]] and the keys k[cu_seqlens_k[i]:cu_seqlens_k[i + 1]];
it attends to no other sequence. With `is_causal`, row r of a sequence attends to its columns 0 to r. All sequences
share one bias of 1 or h heads, as large as the longest sequence: bias[:, :rows, :columns] is added to the scores of
each. `scale` is 1/√e by default. y is 0 for a row that attends to nothing, and for a token behind the last sequence. h
is a multiple of g.

`saved` is a vector that the kernel saves for backward: the loop of `varlen_aten.py` the probabilities, flash attention
its logsumexp, the compiled kernel and the body nothing. Backward recomputes the probabilities if they were not saved. A
kernel may return another tensor in place of dropout_mask: a vector of the masks of all sequences, a key, or the state
of a GPU's generator.
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
from onnxtrain.ops.attention.kernel_arguments import PackedSequences
from onnxtrain.ops.attention.scores import (
    apply_dropout_mask,
    check_operand_ranks,
    matmul_gradients,
    scale_value,
    score_dtype,
)
from onnxtrain.ops.attention.varlen_aten import (
    varlen_attention,
    varlen_attention_backward,
    varlen_attention_dropout,
)
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
from onnxtrain.ops.body_parts import cast, empty_saved_value, reshaped, sum_over
from onnxtrain.ops.constructors import always, no_axes
from onnxtrain.ops.definition import Call, Kernel, NodeView, OpDef
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.gradient_masks import first_cotangent
from onnxtrain.ops.matmul import constant_axes
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.random.dropout import drop_ratio, uses_fast_rng
from onnxtrain.ops.registry import definition_of
from onnxtrain.ops.reshape.dims import expanded, transposed, unsqueezed
from onnxtrain.ops.reshape.rows import arange, zeros

Tensor = torch.Tensor
Grads = list[ir.Value | None]

_NAME, _SAVED = "VarlenAttention", "saved"
_OPERANDS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "bias?")
_ATTRIBUTES = {"scale": None, "is_causal": 0}
_INT64 = ir.DataType.INT64


# Types, axes and flops


def _types(n: NodeView) -> Sequence[TensorType]:
    check_operand_ranks(n, 3)
    tokens, heads, _ = sizes.dims_of(n.q)
    if sizes.dims_of(n.cu_seqlens_q) != sizes.dims_of(n.cu_seqlens_k) or rank_of(n.cu_seqlens_q) != 1:
        raise GraphError(
            f"cu_seqlens_q and cu_seqlens_k of {n.definition.name} are not vectors of the same length",
            expected="one offset per sequence and the end of the last one, in both",
            got=f"{format_type(type_of(n.cu_seqlens_q))} and {format_type(type_of(n.cu_seqlens_k))}",
        )
    if n.bias is not None and (rank_of(n.bias) != 3 or sizes.dims_of(n.bias)[0] not in (1, heads)):
        raise GraphError(
            f"the bias of {n.definition.name} has the wrong shape",
            expected=f"[heads, rows, columns] with 1 or {heads} heads",
            got=format_type(type_of(n.bias)),
        )
    y = TensorType(dtype_of(n.q), (tokens, heads, sizes.dims_of(n.v)[2]))
    return y, TensorType(score_dtype(dtype_of(n.q)), ("saved_elements",))


def _dropout_types(n: NodeView) -> Sequence[TensorType]:
    check_dropout_inputs(n)
    tokens, heads, _ = sizes.dims_of(n.q)
    return *_types(n), TensorType(ir.DataType.BOOL, (heads, tokens, sizes.dims_of(n.k)[0]))


def _head_axes(n: NodeView) -> tuple[str, str]:
    return ("h", "h") if sizes.dims_of(n.q)[1] == sizes.dims_of(n.k)[1] else ("[h]", "[g]")


def _axes(n: NodeView) -> str:
    heads, shared = _head_axes(n)
    bias = "-" if n.bias is None else f"{heads} [l] [s]"
    operands = [f"[t] {heads} [e]", f"[u] {shared} [e]", f"[u] {shared} d", "[n]", "[n]", bias, "-", "-"]
    results = [f"[t] {heads} d", "[saved]", "[h] [t] [u]"][: len(n.node.outputs)]
    return f"{', '.join(operands[: len(n.node.inputs)])} -> {', '.join(results)}"


def _columns(n: NodeView) -> sizes.Size:
    """Return the columns of a row if all sequences had the same length: the lengths are known at run time only."""
    sequences = sizes.maximum(1, sizes.subtract(sizes.dims_of(n.cu_seqlens_k)[0], 1))
    return sizes.floor_divide(sizes.dims_of(n.k)[0], sequences)


# Bodies: the scores of all tokens with all tokens, masked where two tokens belong to different sequences


def _sequence_and_position(op: Builder, cu_seqlens: ir.Value, tokens: sizes.Size) -> tuple[ir.Value, ir.Value]:
    """Return for each token the index of its sequence, and its position in the sequence."""
    cu_seqlens = cast(op, cu_seqlens, _INT64)
    length = op.sizes([sizes.dims_of(cu_seqlens)[0]])
    ends = op.Slice(cu_seqlens, constant_axes(op, 1), length, constant_axes(op, 0))
    token = arange(op, tokens)
    is_past_end = op.GreaterOrEqual(unsqueezed(op, token, 1), unsqueezed(op, ends, 0))
    sequence = op.ReduceSum(op.Cast(is_past_end, to=_INT64), constant_axes(op, 1), keepdims=0)
    return sequence, op.Sub(token, op.Gather(cu_seqlens, sequence, axis=0))


def _visible_and_bias_index(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value]:
    """Return which columns each row attends to [t, u], and the index of each score's bias in bias[h, l * s].

    The second output is any value without a bias.
    """
    (row_sequence, row), (column_sequence, column) = (
        _sequence_and_position(op, cu_seqlens, sizes.dims_of(x)[0])
        for cu_seqlens, x in ((n.cu_seqlens_q, n.q), (n.cu_seqlens_k, n.k))
    )
    row_sequence, row = unsqueezed(op, row_sequence, 1), unsqueezed(op, row, 1)
    sequences = op.size(sizes.subtract(sizes.dims_of(n.cu_seqlens_q)[0], 1))
    same_sequence = op.Equal(row_sequence, unsqueezed(op, column_sequence, 0))
    visible = op.And(same_sequence, op.Less(row_sequence, sequences))
    if n.is_causal:
        visible = op.And(visible, op.LessOrEqual(unsqueezed(op, column, 0), row))
    if n.bias is None:
        return visible, row
    index = op.Add(op.Mul(row, op.size(sizes.dims_of(n.bias)[2])), unsqueezed(op, column, 0))
    return visible, op.Where(visible, index, op.scalar(0, _INT64))


def _heads_first(op: Builder, x: ir.Value, heads: sizes.Size, dtype: ir.DataType) -> ir.Value:
    """Return x[t, g, e] as [h, t, e], each head repeated for the heads of q that share it."""
    tokens, x_heads, width = sizes.dims_of(x)
    x = transposed(op, cast(op, x, dtype), [1, 0, 2])
    if x_heads == heads:
        return x
    group = sizes.floor_divide(heads, x_heads)
    repeated = expanded(op, unsqueezed(op, x, 1), (x_heads, group, tokens, width))
    return reshaped(op, repeated, (heads, tokens, width))


def _operands_and_scores(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value, ir.Value]:
    """Return q, k and v [h, tokens, size], the masked scores [h, t, u], and the index of each score's bias."""
    inner, heads = score_dtype(dtype_of(n.q)), sizes.dims_of(n.q)[1]
    q, k, v = (_heads_first(op, x, heads, inner) for x in (n.q, n.k, n.v))
    scores = op.Mul(op.MatMul(q, transposed(op, k, [0, 2, 1])), scale_value(op, q, n.scale))
    visible, bias_index = _visible_and_bias_index(op, n)
    if n.bias is not None:
        bias_heads, rows, columns = sizes.dims_of(n.bias)
        flat_bias = reshaped(op, cast(op, n.bias, inner), (bias_heads, sizes.multiply(rows, columns)))
        scores = op.Add(scores, op.Gather(flat_bias, bias_index, axis=1))
    return q, k, v, op.Where(visible, scores, op.scalar(-math.inf, inner)), bias_index


def _times_values(op: Builder, n: NodeView, p: ir.Value, v: ir.Value) -> ir.Value:
    return cast(op, transposed(op, op.MatMul(p, v), [1, 0, 2]), dtype_of(n.q))


def _body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    _, _, v, scores, _ = _operands_and_scores(op, n)
    p, saved = op.own.SafeSoftmax(scores, axis=-1), empty_saved_value(op, n.saved)
    if n.definition is VARLEN_ATTENTION:
        return _times_values(op, n, p, v), saved
    dropped, dropout_mask = op.Dropout(p, n.ratio, n.training_mode)
    return _times_values(op, n, dropped, v), saved, dropout_mask


def _sum_over_groups(op: Builder, gradient: ir.Value, x: ir.Value) -> ir.Value:
    """Return the gradient of x[u, g, e] from the gradients [h, u, e] of its repeated heads."""
    tokens, x_heads, width = sizes.dims_of(x)
    heads = sizes.dims_of(gradient)[0]
    if x_heads != heads:
        gradient = reshaped(op, gradient, (x_heads, sizes.floor_divide(heads, x_heads), tokens, width))
        gradient = sum_over(op, gradient, [1], keepdims=False)
    return cast(op, transposed(op, gradient, [1, 0, 2]), dtype_of(x))


def _grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    q, k, v, scores, bias_index = _operands_and_scores(op, n)
    inner = dtype_of(scores)
    p = op.own.SafeSoftmax(scores, axis=-1)
    dy = transposed(op, cast(op, n.dy, inner), [1, 0, 2])

    ds = op.ms.SoftmaxGrad_13(apply_dropout_mask(op, n, op.ms.FusedMatMul(dy, v, transB=1)), p, axis=-1)
    dq, dk, dv = matmul_gradients(op, ds, apply_dropout_mask(op, n, p), dy, q, k, n.scale)
    dq = cast(op, transposed(op, dq, [1, 0, 2]), dtype_of(n.q))
    dk, dv = _sum_over_groups(op, dk, n.k), _sum_over_groups(op, dv, n.v)
    return (dq, dk, dv) if len(n.node.outputs) == 3 else (dq, dk, dv, _bias_gradient(op, n, ds, bias_index))


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


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    dy = first_cotangent(n, cotangents)
    dropout_mask = getattr(n, "dropout_mask", None)
    ratio = None if dropout_mask is None else op.scalar(drop_ratio(n), ir.DataType.DOUBLE)
    output_dbias = n.bias is not None and n.wants("bias")
    results = op.own.VarlenAttentionGrad(
        dy, n.q, n.k, n.v, n.cu_seqlens_q, n.cu_seqlens_k, n.bias, n.y, n.saved, dropout_mask, ratio,
        scale=n.scale, is_causal=n.is_causal or None, output_dbias=int(output_dbias) or None,
    )  # fmt: skip
    gradients: Grads = [*results[:3], None, None, results[3] if output_dbias else None, None, None]
    return gradients[: len(n.node.inputs)]


def _grad_types(n: NodeView) -> Sequence[TensorType]:
    return [type_of(x) for x in (n.q, n.k, n.v, n.bias)[: len(n.node.outputs)]]


# Kernels


def _packed_sequences(n: NodeView, cu_seqlens_q: Any, cu_seqlens_k: Any, bias: Any) -> Call:
    return Call(PackedSequences, cu_seqlens_q, cu_seqlens_k, n.scale, bias, bool(n.is_causal))


def _lower(n: NodeView, q: Any, k: Any, v: Any, *sequences: Any) -> Call:
    return Call(varlen_attention, q, k, v, _packed_sequences(n, *sequences))


def _lower_dropout(n: NodeView, *inputs: Any) -> Call:
    q, k, v, *sequences, _, _ = inputs
    return Call(varlen_attention_dropout, q, k, v, _packed_sequences(n, *sequences), drop_ratio(n), uses_fast_rng(n))


def _lower_grad(n: NodeView, *inputs: Any) -> Call:
    dy, q, k, v, *sequences, _, saved, dropout_mask, _ = inputs
    return Call(
        varlen_attention_backward, dy, q, k, v, _packed_sequences(n, *sequences), saved, bool(n.output_dbias),
        dropout_mask, grad_dropout_arguments(n)[1],
    )  # fmt: skip


def _lower_compiled(n: NodeView, q: Any, k: Any, v: Any, *sequences: Any) -> Call:
    compiled_kernels.request(n.q)
    return Call(varlen_compiled, q, k, v, _packed_sequences(n, *sequences))


def _lower_dropout_compiled(n: NodeView, *inputs: Any) -> Call:
    compiled_kernels.request(n.q)
    q, k, v, *sequences, _, _ = inputs
    return Call(varlen_dropout_compiled, q, k, v, _packed_sequences(n, *sequences), *dropout_arguments(n))


def _lower_grad_compiled(n: NodeView, *inputs: Any) -> Call:
    compiled_kernels.request(n.q)
    dy, q, k, v, *sequences, _, saved, dropout_mask, _ = inputs
    return Call(
        varlen_backward_compiled, dy, q, k, v, _packed_sequences(n, *sequences), saved, dropout_mask,
        *grad_dropout_arguments(n),
    )  # fmt: skip


def _lower_flash(n: NodeView, q: Any, k: Any, v: Any, *sequences: Any) -> Call:
    return Call(varlen_flash, q, k, v, _packed_sequences(n, *sequences))


def _lower_dropout_flash(n: NodeView, *inputs: Any) -> Call:
    q, k, v, *sequences, _, _ = inputs
    return Call(varlen_dropout_flash, q, k, v, _packed_sequences(n, *sequences), drop_ratio(n))


def _lower_grad_flash(n: NodeView, *inputs: Any) -> Call:
    dy, q, k, v, *sequences, y, saved, dropout_mask, _ = inputs
    ratio = 0.0 if n.dropout_mask is None else drop_ratio(n)
    return Call(varlen_backward_flash, dy, q, k, v, _packed_sequences(n, *sequences), y, saved, dropout_mask, ratio)


def _may_compile(n: NodeView, device: str) -> bool:
    """Return whether the compiled kernel may run a node: it does not support a bias."""
    return may_compile(n, device) and n.bias is None


def _dropout_may_compile(n: NodeView, device: str) -> bool:
    return _may_compile(n, device) and dropout_may_compile(n, device)


def _may_flash(n: NodeView, device: str) -> bool:
    """Return whether PyTorch's flash kernel may run a node.

    It does not support a bias, and aligns its causal mask with the last row and column of each sequence.
    """
    widths = {sizes.dims_of(x)[2] for x in (n.q, n.k, n.v)}
    return (
        n.bias is None
        and (n.cu_seqlens_q is n.cu_seqlens_k or not n.is_causal)
        and sizes.dims_of(n.cu_seqlens_q)[0] not in (0, 1)
        and len(widths) == 1
        and flash_runs(device, TORCH_DTYPES[dtype_of(n.q)], widths.pop())
    )


def _dropout_may_flash(n: NodeView, device: str) -> bool:
    """Return whether flash attention may run a node with dropout: it does not sample what eager samples."""
    return _may_flash(n, device) and n.node.metadata_props.get("draws") == "any"


def _grad_may_flash(n: NodeView, device: str) -> bool:
    """Return whether flash attention may run a gradient node: with dropout, it must have run forward.

    Forward then returned the generator's state in place of the dropout mask, which only flash attention reads.
    """
    if n.dropout_mask is None:
        return _may_flash(n, device)
    forward = n.dropout_mask.producer()
    is_dropout = forward is not None and definition_of(forward) is VARLEN_ATTENTION_DROPOUT
    return is_dropout and _dropout_may_flash(VARLEN_ATTENTION_DROPOUT.view(forward), device)


_KERNELS = (
    Kernel(lower=_lower_compiled, applies=_may_compile),
    Kernel(lower=_lower_flash, applies=_may_flash),
    Kernel(lower=_lower, synchronizes=always),
)
_DROPOUT_KERNELS = (
    Kernel(lower=_lower_dropout_compiled, applies=_dropout_may_compile),
    Kernel(lower=_lower_dropout_flash, applies=_dropout_may_flash),
    Kernel(lower=_lower_dropout, synchronizes=always),
)


def _define(dropout: bool) -> OpDef:
    return define_attention(
        _NAME,
        _OPERANDS,
        _SAVED,
        dropout=dropout,
        types=_dropout_types if dropout else _types,
        body=_body,
        gradient=_gradient,
        nondiff_operands=frozenset({"cu_seqlens_q", "cu_seqlens_k"}),
        kernels=_DROPOUT_KERNELS if dropout else _KERNELS,
        axes=_axes,
        columns=_columns,
        attributes=_ATTRIBUTES,
    )


VARLEN_ATTENTION = _define(dropout=False)
VARLEN_ATTENTION_DROPOUT = _define(dropout=True)
VARLEN_ATTENTION_GRAD = define_attention_grad(
    _NAME,
    _OPERANDS,
    _SAVED,
    fourth_gradient="dbias",
    types=_grad_types,
    body=_grad_body,
    kernels=(
        Kernel(lower=_lower_grad_compiled, applies=_may_compile),
        Kernel(lower=_lower_grad_flash, applies=_grad_may_flash),
        Kernel(lower=_lower_grad, synchronizes=always),
    ),
    axes=no_axes,  # the axes of `saved` depend on the kernel
    columns=_columns,
    attributes=_ATTRIBUTES,
)
