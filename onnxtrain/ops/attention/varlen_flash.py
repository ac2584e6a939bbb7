"""Attention of packed sequences (`varlen.py`) that saves its logsumexp, for PyTorch's flash attention on a GPU.

    VarlenFlashAttention(q, k, v, cu_seqlens_q, cu_seqlens_k) -> y[t, h, d], logsumexp[h, t]
    VarlenFlashAttentionDropout(.., ratio, training_mode) -> y, logsumexp, rng_state[2]
    VarlenFlashAttentionGrad(dy, q, k, v, cu_seqlens_q, cu_seqlens_k, y, logsumexp, rng_state?, ratio?) -> dq, dk, dv

rng_state determines the dropout mask: on a GPU it is the generator's state, by other kernels a key (`keyed_bits.py`).
Flash attention runs in float16 and bfloat16, for heads of up to 256 elements, from compute capability 8.0 on. Source:
Dao 2023, https://arxiv.org/abs/2307.08691.

The kernel gets the number of all tokens as the length of the longest sequence: the lengths are known only on the
device, and blocks of rows past the end of a sequence return at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, dtype_of, type_of
from onnxtrain.ops.attention.constructors import check_dropout_inputs, define_attention, define_attention_grad
from onnxtrain.ops.attention.kernel_arguments import DropoutOptions, PackedSequences
from onnxtrain.ops.attention.scores import probabilities_and_logsumexp, score_dtype
from onnxtrain.ops.attention.varlen import (
    ATTRIBUTES,
    OPERANDS,
    Scores,
    by_sequence,
    by_sequence_backward,
    columns_of,
    gradients_of,
    operand_axes,
    result_type,
    score_index,
    scores_of,
    times_values,
)
from onnxtrain.ops.attention.varlen_aten import varlen_logsumexp
from onnxtrain.ops.body_parts import cast, mul_scalar
from onnxtrain.ops.constructors import always, no_axes
from onnxtrain.ops.definition import Call, Kernel, NodeView
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.gradient_masks import first_cotangent
from onnxtrain.ops.random.dropout import drop_ratio, dropout_scale
from onnxtrain.ops.random.keyed_bits import DROP_LEVELS, sample_key
from onnxtrain.ops.random.keyed_dropout import drop_count, keep_mask_nodes
from onnxtrain.torch_compat import aten_kernels

Tensor = torch.Tensor

_MAX_HEAD_SIZE = 256
_CAPABILITY = (8, 0)


# Types, axes, bodies and gradient


def _types(n: NodeView) -> Sequence[TensorType]:
    tokens, heads, _ = sizes.dims_of(n.q)
    return result_type(n), TensorType(score_dtype(dtype_of(n.q)), (heads, tokens))


def _dropout_types(n: NodeView) -> Sequence[TensorType]:
    check_dropout_inputs(n)
    return *_types(n), TensorType(ir.DataType.INT64, (2,))


def _axes(n: NodeView) -> str:
    operands, heads = operand_axes(n)
    return f"{', '.join(operands)} -> [t] {heads} d, {heads} [t]"


def _body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    scores = scores_of(op, n)
    p, logsumexp = probabilities_and_logsumexp(op, scores.masked)
    return times_values(op, n, p, scores.v), logsumexp


def _dropout_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    scores, key = scores_of(op, n), op.own.DropoutKey()
    p, logsumexp = probabilities_and_logsumexp(op, scores.masked)
    return times_values(op, n, _dropped(op, n, p, scores, key), scores.v), logsumexp, key


def _dropped(op: Builder, n: NodeView, x: ir.Value, scores: Scores, key: ir.Value) -> ir.Value:
    """Apply the node's dropout to x[h, t, u]."""
    kept = keep_mask_nodes(op, key, score_index(op, n, scores.pairs), drop_count(n))
    return mul_scalar(op, op.Mul(x, cast(op, kept, dtype_of(x))), _keep_scale(n))


def _grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    scores, key = scores_of(op, n), n.rng_state
    return gradients_of(op, n, scores, lambda x: x if key is None else _dropped(op, n, x, scores, key))[:3]


def _keep_scale(n: NodeView) -> float:
    return dropout_scale(drop_count(n) / DROP_LEVELS, TORCH_DTYPES[score_dtype(dtype_of(n.q))])


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> list[ir.Value | None]:
    rng_state = getattr(n, "rng_state", None)
    ratio = None if rng_state is None else op.scalar(drop_ratio(n), ir.DataType.DOUBLE)
    gradients = op.own.VarlenFlashAttentionGrad(
        first_cotangent(n, cotangents), n.q, n.k, n.v, n.cu_seqlens_q, n.cu_seqlens_k, n.y, n.logsumexp,
        rng_state, ratio, scale=n.scale, is_causal=n.is_causal or None,
    )  # fmt: skip
    return [*gradients, *[None] * (len(n.node.inputs) - 3)]


# Kernels


def attend_saving_logsumexp(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor]:
    """Return y and the logsumexp, by a loop over the sequences."""
    return by_sequence(q, k, v, packed, None), varlen_logsumexp(q, k, packed)


def attend_dropout_saving_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, drop_count: int, keep_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Do the same with dropout; the third output is the key of its mask."""
    key = sample_key()
    y = by_sequence(q, k, v, packed, DropoutOptions(key, drop_count, keep_scale))
    return y, varlen_logsumexp(q, k, packed), key.to(q.device)


def varlen_flash(q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences) -> tuple[Tensor, Tensor]:
    """Return y[t, h, d] and the logsumexp [h, t]."""
    y, logsumexp, _ = varlen_dropout_flash(q, k, v, packed, 0.0)
    return y, logsumexp


def varlen_dropout_flash(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences, ratio: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `varlen_flash` with dropout; the third output is the state of the generator that it sampled from."""
    y, logsumexp, state, _, _ = aten_kernels.varlen_flash(
        *_operands(q, k, v, packed), ratio, packed.causal, False, scale=packed.scale
    )
    return _zero_outside(y, packed.cu_seqlens_q), logsumexp, state.view(torch.int64)


def varlen_backward_flash(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: PackedSequences,
    y: Tensor,
    logsumexp: Tensor,
    state: Tensor | None,
    ratio: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; `state` is None without dropout."""
    state = torch.zeros(2, dtype=torch.int64, device=q.device) if state is None else state
    q, k, v, rows, columns, *longest = _operands(q, k, v, packed)
    dq, dk, dv = aten_kernels.varlen_flash_grad(
        *(dy.contiguous(), q, k, v, y.contiguous(), logsumexp, rows, columns, *longest),
        *(ratio, packed.causal, state.view(torch.uint64), state.new_empty(0, dtype=torch.uint64)),
        scale=packed.scale,
    )
    return (
        _zero_outside(dq, packed.cu_seqlens_q),
        _zero_outside(dk, packed.cu_seqlens_k),
        _zero_outside(dv, packed.cu_seqlens_k),
    )


def _operands(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
    """Return the first arguments of both kernels: q, k, v, the offsets, and upper bounds of the sequence lengths."""
    dense = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    rows, columns = (cu.to(torch.int32).contiguous() for cu in (packed.cu_seqlens_q, packed.cu_seqlens_k))
    return *dense, rows, columns, q.size(0), k.size(0)  # type: ignore[return-value]  # three tensors are unpacked


def _zero_outside(x: Tensor, cu: Tensor) -> Tensor:
    """Fill x[t, ...] with 0 at the tokens that belong to no sequence: the kernel does not write them."""
    token = torch.arange(x.size(0), device=x.device)
    return x.masked_fill_(((token < cu[0]) | (token >= cu[-1]))[:, None, None], 0.0)


# Definitions


def _packed_sequences(n: NodeView, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Call:
    return Call(PackedSequences, cu_seqlens_q, cu_seqlens_k, n.scale, None, bool(n.is_causal))


def _lower(n: NodeView, q: Any, k: Any, v: Any, *sequences: Any) -> Call:
    return Call(attend_saving_logsumexp, q, k, v, _packed_sequences(n, *sequences))


def _lower_flash(n: NodeView, q: Any, k: Any, v: Any, *sequences: Any) -> Call:
    return Call(varlen_flash, q, k, v, _packed_sequences(n, *sequences))


def _lower_dropout(n: NodeView, q: Any, k: Any, v: Any, *others: Any) -> Call:
    packed = _packed_sequences(n, *others[:2])
    return Call(attend_dropout_saving_logsumexp, q, k, v, packed, drop_count(n), _keep_scale(n))


def _lower_dropout_flash(n: NodeView, q: Any, k: Any, v: Any, *others: Any) -> Call:
    return Call(varlen_dropout_flash, q, k, v, _packed_sequences(n, *others[:2]), drop_ratio(n))


def _lower_grad(n: NodeView, dy: Any, q: Any, k: Any, v: Any, *others: Any) -> Call:
    *sequences, _, _, key, _ = others
    dropout = None if n.rng_state is None else Call(DropoutOptions, key, drop_count(n), _keep_scale(n))
    return Call(by_sequence_backward, dy, q, k, v, _packed_sequences(n, *sequences), dropout)


def _lower_grad_flash(n: NodeView, dy: Any, q: Any, k: Any, v: Any, *others: Any) -> Call:
    *sequences, y, logsumexp, state, _ = others
    ratio = 0.0 if n.rng_state is None else drop_ratio(n)
    return Call(varlen_backward_flash, dy, q, k, v, _packed_sequences(n, *sequences), y, logsumexp, state, ratio)


def flash_runs(device: str, q: ir.Value, k: ir.Value, v: ir.Value) -> bool:
    """Return whether flash attention supports such heads on this device; q, k and v may have any leading axes."""
    widths = {sizes.dims_of(x)[-1] for x in (q, k, v)}
    dtype, width = TORCH_DTYPES[dtype_of(q)], widths.pop()
    if device != "cuda" or widths or dtype not in (torch.float16, torch.bfloat16) or not isinstance(width, int):
        return False
    fits = 0 < width <= _MAX_HEAD_SIZE and width % 8 == 0
    return fits and torch.backends.cuda.flash_sdp_enabled() and torch.cuda.get_device_capability() >= _CAPABILITY


def may_flash(n: NodeView, device: str) -> bool:
    """Return whether flash attention may run a node.

    It aligns a causal mask with the last row and column of each sequence, and takes at least one sequence.
    """
    same_lengths = n.cu_seqlens_q is n.cu_seqlens_k or not n.is_causal
    return same_lengths and sizes.dims_of(n.cu_seqlens_q)[0] not in (0, 1) and flash_runs(device, n.q, n.k, n.v)


_READS = (*OPERANDS, "y", "logsumexp")
_NONDIFF = frozenset({"cu_seqlens_q", "cu_seqlens_k"})

define_attention(
    "VarlenFlashAttention",
    OPERANDS,
    ("y", "logsumexp"),
    reads=_READS,
    types=_types,
    body=_body,
    gradient=_gradient,
    nondiff_operands=_NONDIFF,
    kernels=(Kernel(lower=_lower_flash, applies=may_flash), Kernel(lower=_lower, synchronizes=always)),
    axes=_axes,
    columns=columns_of,
    attributes=ATTRIBUTES,
)
define_attention(
    "VarlenFlashAttentionDropout",
    OPERANDS,
    ("y", "logsumexp", "rng_state"),
    dropout=True,
    reads=(*_READS, "rng_state"),
    types=_dropout_types,
    body=_dropout_body,
    gradient=_gradient,
    nondiff_operands=_NONDIFF,
    kernels=(Kernel(lower=_lower_dropout_flash, applies=may_flash), Kernel(lower=_lower_dropout, synchronizes=always)),
    axes=no_axes,  # the index of a probability decides whether it is dropped
    columns=columns_of,
    attributes=ATTRIBUTES,
)
define_attention_grad(
    "VarlenFlashAttentionGrad",
    (*OPERANDS, "y", "logsumexp", "rng_state?", "ratio?"),
    types=lambda n: (type_of(n.q), type_of(n.k), type_of(n.v)),
    body=_grad_body,
    kernels=(Kernel(lower=_lower_grad_flash, applies=may_flash), Kernel(lower=_lower_grad, synchronizes=always)),
    axes=no_axes,
    columns=columns_of,
    attributes=ATTRIBUTES,
)
