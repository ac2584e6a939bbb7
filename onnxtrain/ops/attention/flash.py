"""Scaled dot-product attention.

    FlashAttention(q[b, h, l, e], k[b, g, s, e], v[b, g, s, d], mask?) -> y[b, h, l, d], logsumexp[b, h, l]
    FlashAttentionDropout(.., ratio, training_mode) -> y, logsumexp, rng_state[2]          (`flash_dropout.py`)
    FlashAttentionGrad(dy, q, k, v, mask?, y, logsumexp, rng_state?, ratio?) -> dq, dk, dv

    scores = scale * q @ kᵀ + mask      p = softmax(scores)      y = p @ v
    dv = pᵀ @ dy      dp = dy @ vᵀ      ds = p * (dp - Σ dy * y)      dq = scale * ds @ k      dk = scale * dsᵀ @ q

`scale` is 1/√e by default. The mask broadcasts to the scores. y and logsumexp of a fully masked row are 0. h is a
multiple of g: h/g heads of q share one head of k and v. Source: Dao 2023, https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import OWN, TensorType, dtype_of, is_float, rank_of, type_of
from onnxtrain.graph.verify import format_type
from onnxtrain.ops.attention import compiled_kernels, gpu_kernels
from onnxtrain.ops.attention.flash_formula import drop_by_key, formula, formula_backward
from onnxtrain.ops.attention.heads import group_size, repeat_heads, sum_over_groups
from onnxtrain.ops.attention.kernel_arguments import DropoutOptions, ScoreOptions
from onnxtrain.ops.attention.masks import causal_mask
from onnxtrain.ops.attention.scores import (
    check_operand_ranks,
    matmul_gradients,
    probabilities_and_logsumexp,
    scale_value,
    score_dtype,
    score_factor,
)
from onnxtrain.ops.body_parts import cast, mul_scalar, reshaped
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.definition import NOT_DIFFERENTIABLE, Call, Effects, Gradient, Kernel, NodeView, OpDef
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.interfaces.scalar_factors import SCALAR_FACTORS
from onnxtrain.ops.matmul import constant_axes
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.random.dropout import drop_ratio, dropout_scale
from onnxtrain.ops.random.keyed_bits import DROP_LEVELS
from onnxtrain.ops.random.keyed_dropout import drop_count, keep_mask_nodes
from onnxtrain.ops.registry import define
from onnxtrain.ops.reshape.rows import arange
from onnxtrain.system.machine import current_machine
from onnxtrain.torch_compat import aten_kernels

Grad = ir.Value | None

_FLASH = int(torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


# Types, axes and flops


def batch_and_heads(n: NodeView) -> Sizes:
    check_operand_ranks(n, 4)
    if n.mask is not None and not is_float(dtype_of(n.mask)):
        raise GraphError(
            f"{n.definition.name} supports only additive masks",
            expected="a floating-point mask",
            got=format_type(type_of(n.mask)),
        )
    return sizes.dims_of(n.q)[:2]


def forward_types(n: NodeView) -> Sequence[TensorType]:
    leading = (*batch_and_heads(n), sizes.dims_of(n.q)[2])
    return (
        TensorType(dtype_of(n.q), (*leading, sizes.dims_of(n.v)[3])),
        TensorType(score_dtype(dtype_of(n.q)), leading),
    )


def _head_axes(n: NodeView) -> tuple[str, str]:
    """Return the head axes of q and of k and v: heads pass through unless heads of q share one of k and v."""
    return ("h", "h") if group_size(n.q, n.k) == 1 else ("[h]", "g")


def _forward_axes(n: NodeView) -> str:
    heads, shared = _head_axes(n)
    rows = "[l]" if n.is_causal else "l"
    operands = [f"b {heads} {rows} e", f"b {shared} s e", f"b {shared} s d"]
    if len(n.node.inputs) > 3:
        operands.append("-" if n.mask is None else f"b {heads} {rows} s" if rank_of(n.mask) == 4 else f"{rows} s")
    return f"{', '.join(operands)} -> b {heads} {rows} d, b {heads} {rows}"


def _backward_axes(n: NodeView) -> str:
    heads, shared = _head_axes(n)
    batch = "b"
    if n.rng_state is not None:  # the index of a probability determines whether it is dropped
        batch, heads, shared = "[b]", "[h]", "[g]"
    q, k, v = f"{batch} {heads} [l] [e]", f"{batch} {shared} [s] [e]", f"{batch} {shared} [s] [d]"
    mask = "-" if n.mask is None else f"{batch} {heads} [l] [s]" if rank_of(n.mask) == 4 else "[l] [s]"
    operands = [f"{batch} {heads} [l] [d]", q, k, v, mask, f"{batch} {heads} [l] [d]", f"{batch} {heads} [l]", "-", "-"]
    return f"{', '.join(operands[: len(n.node.inputs)])} -> {q}, {k}, {v}"


def _flops(n: NodeView, matmuls: int) -> Size:
    """Return the flops of `matmuls` matmuls of the size of q @ kᵀ."""
    return sizes.multiply(2 * matmuls, *sizes.dims_of(n.q), sizes.dims_of(n.k)[2])


# Kernels

_MIN_MASKED_COLUMNS = 128  # for 64 PyTorch's kernel takes 0.9 of the compiled kernel's time, with any mask or none


def _runs_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float | None
) -> bool:
    """Return whether eager PyTorch chooses its CPU flash kernel, by sizes, strides and the enabled backends."""
    if q.device.type != "cpu" or not aten_kernels.has_cpu_flash():
        return False
    enable_gqa = q.size(1) != k.size(1)
    return aten_kernels.SDP_CHOICE.get()(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa) == _FLASH


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    may_compile: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and the logsumexp, by the kernel that eager PyTorch chooses on a CPU, or by PyTorch's math path.

    With `may_compile`, the compiled kernel runs if it is compiled and faster; its results differ by rounding only.
    """
    if may_compile and _compiled_is_faster(q, k, v, mask, is_causal, scale):
        results = compiled_kernels.forward(q, k, v, ScoreOptions(scale, mask=mask, causal=is_causal))
        if results is not None:
            return results
    if _runs_flash(q, k, v, mask, is_causal, scale):
        return aten_kernels.CPU_FLASH.get()(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return formula(q, k, v, ScoreOptions(scale, mask=mask, causal=is_causal))


def attention_backward(
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    y: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    may_compile: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v, by the backward kernel of the kernel that `attention` chooses."""
    if may_compile and _compiled_is_faster(q, k, v, mask, is_causal, scale):
        gradients = compiled_kernels.backward(dy, q, k, v, ScoreOptions(scale, mask=mask, causal=is_causal))
        if gradients is not None:
            return gradients
    if _runs_flash(q, k, v, mask, is_causal, scale):
        return aten_kernels.CPU_FLASH_GRAD.get()(dy, q, k, v, y, logsumexp, 0.0, is_causal, attn_mask=mask, scale=scale)
    return formula_backward(dy, q, k, v, ScoreOptions(scale, mask=mask, causal=is_causal))


def _compiled_is_faster(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float | None
) -> bool:
    """Return whether the compiled kernel is faster than the kernel that PyTorch chooses.

    It is faster than PyTorch's flash kernel if a mask hides columns from whole blocks of rows, otherwise as fast
    (`compiled_kernels.py`). Its threads split heads of k only; PyTorch's flash kernel splits rows too, and is faster
    with few heads per thread.
    """
    if q.dtype == torch.bfloat16 or q.size(0) * k.size(1) * 2 < current_machine().threads:
        return False
    masked = mask is not None and k.size(2) >= _MIN_MASKED_COLUMNS
    return is_causal or masked or not _runs_flash(q, k, v, mask, is_causal, scale)


def on_gpu(n: NodeView, device: str) -> bool:
    """Return whether the node runs PyTorch's attention kernels for a GPU (`gpu_kernels.py`)."""
    return device == "cuda" and aten_kernels.has_gpu_attention()


def score_options(n: NodeView, mask: Any) -> Call:
    """Return the `ScoreOptions` of a node."""
    return Call(ScoreOptions, n.scale, None, mask, causal=bool(n.is_causal))


def dropout_by_key(n: NodeView, key: Any) -> Call:
    """Return the dropout of a node with a ratio."""
    count = drop_count(n)
    keep_scale = dropout_scale(count / DROP_LEVELS, TORCH_DTYPES[score_dtype(dtype_of(n.q))])
    return Call(drop_by_key, Call(DropoutOptions, key, count, keep_scale))


def _lower_gpu(n: NodeView, q: Any, k: Any, v: Any, mask: Any) -> Call:
    return Call(gpu_attention, q, k, v, score_options(n, mask))


def gpu_attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    y, logsumexp, _ = gpu_kernels.attention(*arguments)
    return y, logsumexp


def _lower_grad_gpu(n: NodeView, dy: Any, q: Any, k: Any, v: Any, mask: Any, *saved: Any) -> Call:
    *rest, _ = saved
    ratio = 0.0 if n.rng_state is None else drop_ratio(n)
    return Call(gpu_kernels.attention_backward, dy, q, k, v, *rest, score_options(n, mask), ratio)


def _lower(n: NodeView, q: Any, k: Any, v: Any, mask: Any) -> Call:
    return Call(attention, q, k, v, mask, bool(n.is_causal), n.scale)


def _lower_compiled(n: NodeView, q: Any, k: Any, v: Any, mask: Any) -> Call:
    compiled_kernels.request(n.q)
    return Call(attention, q, k, v, mask, bool(n.is_causal), n.scale, True)


def _lower_grad(n: NodeView, *inputs: Any) -> Call:
    *operands, _, _ = inputs
    return Call(attention_backward, *operands, bool(n.is_causal), n.scale)


def _lower_grad_compiled(n: NodeView, *inputs: Any) -> Call:
    compiled_kernels.request(n.q)
    *operands, _, _ = inputs
    return Call(attention_backward, *operands, bool(n.is_causal), n.scale, True)


def _lower_grad_dropout(n: NodeView, dy: Any, q: Any, k: Any, v: Any, mask: Any, *saved: Any) -> Call:
    _, _, key, _ = saved
    return Call(formula_backward, dy, q, k, v, score_options(n, mask), dropout_by_key(n, key))


def _has_dropout(n: NodeView, device: str) -> bool:
    return n.rng_state is not None


# FlashAttention


def operands_and_scores(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Return q, k and v in the scores' type, with a head of k and v for each of q's; and the masked scores."""
    inner = score_dtype(dtype_of(n.q))
    q, k, v = (cast(op, x, inner) for x in (n.q, n.k, n.v))
    group = group_size(n.q, n.k)
    k, v = repeat_heads(op, k, group), repeat_heads(op, v, group)
    scores = op.Mul(op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), scale_value(op, q, n.scale))
    if n.mask is not None:
        scores = op.Add(scores, cast(op, n.mask, inner))
    if n.is_causal:
        scores = op.Add(scores, causal_mask(op, sizes.dims_of(q)[2], sizes.dims_of(k)[2], inner))
    return q, k, v, scores


def _forward_body(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value]:
    _, _, v, scores = operands_and_scores(op, n)
    p, logsumexp = probabilities_and_logsumexp(op, scores)
    return cast(op, op.MatMul(p, v), dtype_of(n.q)), logsumexp


def _gradient(op: Builder, n: NodeView, dy: ir.Value | None, dlogsumexp: ir.Value | None) -> Sequence[Grad]:
    if dlogsumexp is not None:
        raise GraphError(
            "the logsumexp of FlashAttention is not differentiable",
            expected="a gradient of y only",
            got="a gradient of logsumexp",
        )
    if dy is None:
        return [None] * len(n.node.inputs)
    if n.mask is not None and n.wants("mask"):
        return _gradients_in_ops(op, n, dy, n.y)
    gradients = op.own.FlashAttentionGrad(
        dy, n.q, n.k, n.v, n.mask, n.y, n.logsumexp, scale=n.scale, is_causal=n.is_causal or None
    )
    return (*gradients, None)[: len(n.node.inputs)]


def _gradients_in_ops(
    op: Builder, n: NodeView, dy: ir.Value, y: ir.Value, drop: Callable[[ir.Value], ir.Value] | None = None
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """Return dq, dk, dv and the gradient of the mask [b, h, l, s], by matmuls and elementwise ops.

    `drop` applies the dropout of the probabilities. Without it, Σ dp * p is computed as Σ dy * y, which is smaller.
    """
    q, k, v, scores = operands_and_scores(op, n)
    inner = dtype_of(scores)
    dy, y = cast(op, dy, inner), cast(op, y, inner)
    p = op.own.SafeSoftmax(scores, axis=-1)
    dp = op.ms.FusedMatMul(dy, v, transB=1)
    if drop is None:
        terms = op.Mul(dy, y)
    else:
        dp = drop(dp)
        terms = op.Mul(dp, p)
    ds = op.Mul(p, op.Sub(dp, op.ReduceSum(terms, constant_axes(op, 3), keepdims=1)))
    dq, dk, dv = matmul_gradients(op, ds, p if drop is None else drop(p), dy, q, k, n.scale)
    dq, dk, dv = cast(op, dq, dtype_of(n.q)), sum_over_groups(op, dk, n.k), sum_over_groups(op, dv, n.v)
    return dq, dk, dv, cast(op, ds, inner if n.mask is None else dtype_of(n.mask))


def dropped(op: Builder, n: NodeView, x: ir.Value, key: ir.Value) -> ir.Value:
    """Apply to x[b, h, l, s] the dropout of a node with `ratio` whose mask a key determines (`keyed_bits.py`)."""
    count, shape = drop_count(n), sizes.dims_of(x)
    index = reshaped(op, arange(op, sizes.multiply(*shape)), shape)
    kept = cast(op, keep_mask_nodes(op, key, index, count), dtype_of(x))
    return mul_scalar(op, op.Mul(x, kept), dropout_scale(count / DROP_LEVELS, TORCH_DTYPES[dtype_of(x)]))


def _backward_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    if n.rng_state is None:
        return _gradients_in_ops(op, n, n.dy, n.y)[:3]
    return _gradients_in_ops(op, n, n.dy, n.y, lambda x: dropped(op, n, x, n.rng_state))[:3]


FLASH_ATTENTION = define_pure(
    OWN,
    "FlashAttention",
    ("q", "k", "v", "mask?"),
    ("y", "logsumexp"),
    attributes={"scale": None, "is_causal": 0},
    shapes=forward_types,
    body=_forward_body,
    gradient=(Gradient(_gradient, reads=("q", "k", "v", "mask", "y", "logsumexp")),),
    kernels=(
        Kernel(lower=_lower_gpu, applies=on_gpu),
        Kernel(lower=_lower_compiled, applies=may_compile),
        Kernel(lower=_lower),
    ),
    axes=_forward_axes,
    flops=lambda n: _flops(n, 2),
)
SCALAR_FACTORS.register(FLASH_ATTENTION, score_factor)

FLASH_ATTENTION_GRAD = define(
    OpDef(
        domain=OWN,
        name="FlashAttentionGrad",
        inputs=("dy", "q", "k", "v", "mask?", "y", "logsumexp", "rng_state?", "ratio?"),
        outputs=("dq", "dk", "dv"),
        attributes={"scale": None, "is_causal": 0},
        from_torch={},
        shapes=lambda n: (type_of(n.q), type_of(n.k), type_of(n.v)),
        body=_backward_body,
        gradient=NOT_DIFFERENTIABLE,
        nondiff_inputs=frozenset(),
        kernels=(
            Kernel(lower=_lower_grad_gpu, applies=on_gpu),
            Kernel(lower=_lower_grad_dropout, applies=_has_dropout),
            Kernel(lower=_lower_grad_compiled, applies=may_compile),
            Kernel(lower=_lower_grad),
        ),
        axes=_backward_axes,
        effects=Effects.NONE,
        aliases={},
    )
)
FLOPS.register(FLASH_ATTENTION_GRAD, lambda n: _flops(n, 5))
