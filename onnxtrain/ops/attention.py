"""Scaled dot-product attention.

    FlashAttention(q[b, h, l, e], k[b, g, s, e], v[b, g, s, d], mask?) -> y[b, h, l, d], logsumexp[b, h, l]
    FlashAttentionGrad(dy, q, k, v, mask?, y, logsumexp) -> dq, dk, dv

    scores = scale * q @ kᵀ + mask      p = softmax(scores)      y = p @ v
    dv = pᵀ @ dy      dp = dy @ vᵀ      ds = p * (dp - Σ dy * y)      dq = scale * ds @ k      dk = scale * dsᵀ @ q

`scale` is 1/√e by default. The mask is added, and broadcasts. A row that is masked whole gives 0, and its logsumexp is
0. h is a multiple of g: h/g heads of q share one of k and v. Source: Dao 2023, https://arxiv.org/abs/2307.08691.

What PyTorch computes in its math path whatever the sizes (dropout, other ranks) becomes the nodes of that path, in its
order, so that the same random numbers are drawn.
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
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import OWN, TensorType, dtype_of, is_float, rank_of, type_of
from onnxtrain.ops.constructors import cast
from onnxtrain.ops.definition import NOT_DIFFERENTIABLE, Call, Effects, Gradient, Kernel, NodeView, OpDef
from onnxtrain.ops.index.fill import filled
from onnxtrain.ops.matmul import constant_axes, is_exact_attribute
from onnxtrain.ops.randomness import dropped_out
from onnxtrain.ops.registry import define
from onnxtrain.ops.softmax import safe_softmax

Grad = ir.Value | None

_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_FLASH = int(torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


def _accumulated(dtype: ir.DataType) -> ir.DataType:
    """The element type in which scores and their sums are held."""
    return ir.DataType.FLOAT if dtype in _HALF else dtype


def _groups(q: ir.Value, k: ir.Value) -> Size:
    """How many heads of q share one of k."""
    if rank_of(q) < 3 or sizes.of(q)[-3] == sizes.of(k)[-3]:
        return 1
    return sizes.floor_divide(sizes.of(q)[-3], sizes.of(k)[-3])


def _repeated(op: Builder, value: ir.Value, groups: Size) -> ir.Value:
    """Each head [..., g, s, e] repeated in place: [..., g * groups, s, e]."""
    if groups == 1:
        return value
    *batch, heads, rows, columns = sizes.of(value)
    spread = op.Unsqueeze(value, constant_axes(op, len(batch) + 1))
    spread = op.Expand(spread, op.sizes([*batch, heads, groups, rows, columns]))
    result: ir.Value = op.Reshape(spread, op.sizes([*batch, sizes.multiply(heads, groups), rows, columns]), allowzero=1)
    return result


def _unrepeated(op: Builder, value: ir.Value) -> tuple[ir.Value, Size]:
    """The heads [..., g, s, e] that `value` repeats in place, and how often; `value` and 1 where it repeats none.

    Models write it as Expand and Reshape, then autocast as Cast. Its gradient would be summed in the narrow type.
    """
    source = _input_of(value, "Cast") or value
    spread = _input_of(source, "Reshape")
    spread = spread and (_input_of(spread, "Clone") or spread)
    narrow = spread and _input_of(spread, "Expand")
    if spread is None or narrow is None or rank_of(narrow) != rank_of(source) + 1 or rank_of(spread) < 4:
        return value, 1
    *batch, heads, groups, rows, columns = sizes.of(spread)
    if sizes.of(narrow) != (*batch, heads, 1, rows, columns):
        return value, 1
    if sizes.of(source) != (*batch, sizes.multiply(heads, groups), rows, columns):
        return value, 1
    return cast(op, op.Squeeze(narrow, constant_axes(op, len(batch) + 1)), dtype_of(value)), groups


def _input_of(value: ir.Value, op_type: str) -> ir.Value | None:
    """The first input of the node that gives `value`, where it is one of this type."""
    node = value.producer()
    return node.inputs[0] if node is not None and node.op_type == op_type else None


def _causal(op: Builder, rows: Size, columns: Size, dtype: ir.DataType) -> ir.Value:
    """The additive mask [rows, columns] that lets a row see the columns up to its own number."""
    seen = op.Trilu(filled(op, [rows, columns], 1, ir.DataType.BOOL), upper=0)
    return _additive(op, seen, dtype)


def _additive(op: Builder, mask: ir.Value, dtype: ir.DataType) -> ir.Value:
    """A bool mask, true where a column is seen, as what is added to scores."""
    result: ir.Value = op.Where(mask, op.scalar(0.0, dtype), op.scalar(-math.inf, dtype))
    return result


# Capture


def _capture(
    op: Builder,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    attn_mask: ir.Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not is_float(dtype_of(query)) or isinstance(scale, str):
        return NotImplemented
    mask = attn_mask
    if mask is not None and dtype_of(mask) == ir.DataType.BOOL:
        mask = _additive(op, mask, dtype_of(query))
    groups = _groups(query, key) if enable_gqa else 1
    if dropout_p > 0 or not _has_flash_form(query, key, value, mask, groups):
        return _math_path(op, query, key, value, mask, dropout_p, is_causal, scale, groups)
    query, scale = _with_attribute(op, query, scale)
    return op.own.FlashAttention(query, key, value, mask, scale=scale, is_causal=int(is_causal) or None)[0]


def _has_flash_form(q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value | None, groups: Size) -> bool:
    """Whether PyTorch may take its flash kernel: what it asks of ranks and sizes. The rest is asked when it runs."""
    if not torch.backends.cuda.flash_sdp_enabled() or any(rank_of(x) != 4 for x in (q, k, v)):
        return False
    if mask is not None and rank_of(mask) not in (2, 4):
        return False
    shapes = [sizes.of(x) for x in (q, k, v)]
    batch, heads, width = ({shape[axis] for shape in shapes} for axis in (0, 1, 3))
    return _may_be_equal(batch) and (groups != 1 or _may_be_equal(heads)) and _may_be_equal(width)


def _may_be_equal(found: set[Size]) -> bool:
    return sum(isinstance(size, int) for size in found) <= 1 and (1 not in found or len(found) == 1)


def _with_attribute(op: Builder, q: ir.Value, scale: float | None) -> tuple[ir.Value, float | None]:
    """A scale that is neither the default nor exact as an attribute moves into q."""
    width = sizes.of(q)[-1]
    if scale is None or (isinstance(width, int) and width and math.isclose(scale, 1 / math.sqrt(width), rel_tol=1e-15)):
        return q, None
    if is_exact_attribute(scale):
        return q, float(scale)
    return op.Mul(q, op.scalar(scale, like=q)), 1.0


def _scale_of(op: Builder, q: ir.Value, scale: float | None, power: float = 1.0) -> ir.Value:
    """The `power` of the scale as a 0-dimensional value of q's type."""
    width = sizes.of(q)[-1]
    if scale is None and isinstance(width, str):
        exponent = op.scalar(-power / 2, ir.DataType.DOUBLE)
        return cast(op, op.Pow(op.size(width, ir.DataType.DOUBLE), exponent), dtype_of(q))
    number = scale if scale is not None else 1 / math.sqrt(int(width)) if width else math.inf
    return op.scalar(math.copysign(math.sqrt(abs(number)) if power == 0.5 else abs(number), number), like=q)


def _math_path(
    op: Builder,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    mask: ir.Value | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    groups: Size,
) -> ir.Value:
    """The nodes of aten._scaled_dot_product_attention_math: √scale on q and on k, half types computed in float."""
    wanted = dtype_of(q)
    (k, groups_k), (v, groups_v) = ((k, groups), (v, groups)) if groups != 1 else (_unrepeated(op, x) for x in (k, v))
    inner = wanted if torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() else _accumulated(wanted)
    q, k, v = (cast(op, x, inner) for x in (q, k, v))
    root = _scale_of(op, q, scale, 0.5)
    positive = root if scale is None or scale >= 0 else op.scalar(math.sqrt(-scale), like=q)
    k = _repeated(op, op.Mul(k, positive), groups_k)
    scores = op.ms.FusedMatMul(op.Mul(q, root), k, transB=1)
    if is_causal:
        mask = _causal(op, sizes.of(q)[-2], sizes.of(k)[-2], inner)
    if mask is not None:
        scores = op.Add(scores, cast(op, mask, inner))
    p = op.own.SafeSoftmax(scores, axis=-1)
    if dropout_p > 0:
        p, _ = dropped_out(op, p, dropout_p)
    return cast(op, op.MatMul(p, _repeated(op, v, groups_v)), wanted)


# Types, axes and flops


def _batch_and_heads(n: NodeView) -> Sizes:
    shape = sizes.of(n.q)
    if any(rank_of(x) != 4 for x in (n.q, n.k, n.v)):
        raise GraphError(f"{n.definition.name} takes q, k and v of four dimensions", got=f"q{list(shape)}")
    if n.mask is not None and not is_float(dtype_of(n.mask)):
        raise GraphError(f"{n.definition.name} adds its mask to the scores", got=f"a mask of {dtype_of(n.mask).name}")
    return shape[:2]


def _forward_types(n: NodeView) -> Sequence[TensorType]:
    leading = (*_batch_and_heads(n), sizes.of(n.q)[2])
    return (
        TensorType(dtype_of(n.q), (*leading, sizes.of(n.v)[3])),
        TensorType(_accumulated(dtype_of(n.q)), leading),
    )


def _head_axes(n: NodeView) -> tuple[str, str]:
    """Heads pass where each head of q has one of k and v."""
    return ("h", "h") if _groups(n.q, n.k) == 1 else ("[h]", "g")


def _forward_axes(n: NodeView) -> str:
    heads, shared = _head_axes(n)
    rows = "[l]" if n.is_causal else "l"
    operands = [f"b {heads} {rows} e", f"b {shared} s e", f"b {shared} s d"]
    if len(n.node.inputs) > 3:
        operands.append("-" if n.mask is None else f"b {heads} {rows} s" if rank_of(n.mask) == 4 else f"{rows} s")
    return f"{', '.join(operands)} -> b {heads} {rows} d, b {heads} {rows}"


def _backward_axes(n: NodeView) -> str:
    heads, shared = _head_axes(n)
    q, k, v = f"b {heads} [l] [e]", f"b {shared} [s] [e]", f"b {shared} [s] [d]"
    mask = "-" if n.mask is None else f"b {heads} [l] [s]" if rank_of(n.mask) == 4 else "[l] [s]"
    return f"b {heads} [l] [d], {q}, {k}, {v}, {mask}, b {heads} [l] [d], b {heads} [l] -> {q}, {k}, {v}"


def _products_flops(n: NodeView, count: int) -> Size:
    """The flops of `count` products of the size of q @ kᵀ."""
    return sizes.multiply(2 * count, *sizes.of(n.q), sizes.of(n.k)[2])


# Kernels


def _runs_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float | None
) -> bool:
    """Whether eager PyTorch takes its CPU flash kernel: it asks sizes, strides and the enabled backends."""
    if q.device.type != "cpu":
        return False
    shared = q.size(1) != k.size(1)
    return torch._fused_sdp_choice(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=shared) == _FLASH


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel that eager PyTorch takes for these tensors on a CPU; elsewhere the formula."""
    if _runs_flash(q, k, v, mask, is_causal, scale):
        return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    scores, _, v_ = _scores(q, k, v, mask, is_causal, scale)
    logsumexp = scores.logsumexp(-1)
    logsumexp = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    return torch.matmul(safe_softmax(scores, -1), v_).to(q.dtype), logsumexp


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of `attention`, by the kernel that belongs to the one it took."""
    if _runs_flash(q, k, v, mask, is_causal, scale):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(  # type: ignore[no-any-return]
            dy, q, k, v, y, logsumexp, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    scores, k_, v_ = _scores(q, k, v, mask, is_causal, scale)
    # From the scores: for a row of float32's least number the logsumexp has lost the number of its columns.
    p = safe_softmax(scores, -1)
    dy_, q_ = dy.to(p.dtype), q.to(p.dtype)
    ds = (torch.matmul(dy_, v_.mT) - (dy_ * y).sum(-1, keepdim=True)).mul_(p).mul_(_number_of(scale, q))
    dk = torch.matmul(ds.mT, q_).unflatten(1, (k.size(1), -1) if k.size(1) else (0, 1)).sum(2)
    dv = torch.matmul(p.mT, dy_).unflatten(1, (k.size(1), -1) if k.size(1) else (0, 1)).sum(2)
    return torch.matmul(ds, k_).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _number_of(scale: float | None, q: torch.Tensor) -> float:
    if scale is not None:
        return scale
    return 1 / math.sqrt(q.size(-1)) if q.size(-1) else math.inf


def _scores(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Masked scores as PyTorch's math path computes them; k and v as they are multiplied."""
    if q.dtype in (torch.float16, torch.bfloat16):
        q, k, v = q.float(), k.float(), v.float()
    if q.size(1) != k.size(1):
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    number = _number_of(scale, q)
    root = math.sqrt(abs(number))
    scores = torch.matmul(q * math.copysign(root, number), k.mT * root)
    if mask is not None:
        scores = scores.add_(mask)
    if is_causal:
        scores = scores.masked_fill_(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1), -math.inf
        )
    return scores, k, v


# FlashAttention


def _rows(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """q, k and v in the type of the scores, each head of k and v repeated; and the masked scores."""
    inner = _accumulated(dtype_of(n.q))
    q, k, v = (cast(op, x, inner) for x in (n.q, n.k, n.v))
    groups = _groups(n.q, n.k)
    k, v = _repeated(op, k, groups), _repeated(op, v, groups)
    scores = op.Mul(op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), _scale_of(op, q, n.scale))
    if n.mask is not None:
        scores = op.Add(scores, cast(op, n.mask, inner))
    if n.is_causal:
        scores = op.Add(scores, _causal(op, sizes.of(q)[2], sizes.of(k)[2], inner))
    return q, k, v, scores


def _forward_body(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value]:
    _, _, v, scores = _rows(op, n)
    last = constant_axes(op, 3)
    top = op.ReduceMax(scores, last, keepdims=1)
    masked = op.Equal(top, op.scalar(-math.inf, like=top))
    top = op.Where(masked, op.scalar(0.0, like=top), top)
    powers = op.Exp(op.Sub(scores, top))
    total = op.Where(masked, op.scalar(1.0, like=top), op.ReduceSum(powers, last, keepdims=1))
    y = op.MatMul(op.Div(powers, total), v)
    return cast(op, y, dtype_of(n.q)), op.Squeeze(op.Add(op.Log(total), top), last)


def _gradient(op: Builder, n: NodeView, dy: ir.Value | None, dlogsumexp: ir.Value | None) -> Sequence[Grad]:
    if dlogsumexp is not None:
        raise GraphError("the logsumexp of FlashAttention is kept for its gradient and has none itself")
    if dy is None:
        return [None] * len(n.node.inputs)
    if n.mask is not None and n.wants("mask"):
        return _formula(op, n, dy, n.y)
    found = op.own.FlashAttentionGrad(
        dy, n.q, n.k, n.v, n.mask, n.y, n.logsumexp, scale=n.scale, is_causal=n.is_causal or None
    )
    return (*found, None)[: len(n.node.inputs)]


def _formula(op: Builder, n: NodeView, dy: ir.Value, y: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """dq, dk, dv and the gradient of the mask [b, h, l, s] in ops of their own."""
    q, k, v, scores = _rows(op, n)
    inner = dtype_of(scores)
    dy, y = cast(op, dy, inner), cast(op, y, inner)
    p = op.own.SafeSoftmax(scores, axis=-1)
    dp = op.ms.FusedMatMul(dy, v, transB=1)
    ds = op.Mul(p, op.Sub(dp, op.ReduceSum(op.Mul(dy, y), constant_axes(op, 3), keepdims=1)))
    scaled = op.Mul(ds, _scale_of(op, q, n.scale))
    dq = cast(op, op.MatMul(scaled, k), dtype_of(n.q))
    dk = _summed_heads(op, op.ms.FusedMatMul(scaled, q, transA=1), n.k)
    dv = _summed_heads(op, op.ms.FusedMatMul(p, dy, transA=1), n.v)
    return dq, dk, dv, cast(op, ds, inner if n.mask is None else dtype_of(n.mask))


def _summed_heads(op: Builder, gradient: ir.Value, value: ir.Value) -> ir.Value:
    """The gradients of heads that share one of `value`, summed."""
    batch, heads, rows, columns = sizes.of(value)
    groups = _groups(gradient, value)
    if groups != 1:
        split = op.Reshape(gradient, op.sizes([batch, heads, groups, rows, columns]), allowzero=1)
        gradient = op.ReduceSum(split, constant_axes(op, 2), keepdims=0)
    return cast(op, gradient, dtype_of(value))


FLASH_ATTENTION = define(
    OpDef(
        domain=OWN,
        name="FlashAttention",
        inputs=("q", "k", "v", "mask?"),
        outputs=("y", "logsumexp"),
        attributes={"scale": None, "is_causal": 0},
        since=1,
        from_torch={"aten.scaled_dot_product_attention.default": _capture},
        shapes=_forward_types,
        body=_forward_body,
        native_ok=lambda n: False,
        gradient=(Gradient(_gradient, reads=("q", "k", "v", "mask", "y", "logsumexp")),),
        stops=frozenset(),
        kernels=(Kernel(lower=lambda n, q, k, v, mask: Call(attention, q, k, v, mask, bool(n.is_causal), n.scale)),),
        axes=_forward_axes,
        effects=Effects.NONE,
        aliases={},
        flops=lambda n: _products_flops(n, 2),
        host=None,
        detached=frozenset({"logsumexp"}),
    )
)

FLASH_ATTENTION_GRAD = define(
    OpDef(
        domain=OWN,
        name="FlashAttentionGrad",
        inputs=("dy", "q", "k", "v", "mask?", "y", "logsumexp"),
        outputs=("dq", "dk", "dv"),
        attributes={"scale": None, "is_causal": 0},
        since=1,
        from_torch={},
        shapes=lambda n: (type_of(n.q), type_of(n.k), type_of(n.v)),
        body=lambda op, n: _formula(op, n, n.dy, n.y)[:3],
        native_ok=lambda n: False,
        gradient=NOT_DIFFERENTIABLE,
        stops=frozenset(),
        kernels=(
            Kernel(
                lower=lambda n, dy, q, k, v, mask, y, logsumexp: Call(
                    attention_backward, dy, q, k, v, mask, y, logsumexp, bool(n.is_causal), n.scale
                )
            ),
        ),
        axes=_backward_axes,
        effects=Effects.NONE,
        aliases={},
        flops=lambda n: _products_flops(n, 5),
        host=None,
    )
)
