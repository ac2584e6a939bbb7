"""A linear layer and the cross entropy of its scores in one op, which never holds all scores.

    LinearCrossEntropy(x[n, h], w[c, h], b[c]?, labels[n], weights[c]?) -> loss, dx?, dw?, db?
        loss = SoftmaxCrossEntropyLossInternal(x @ wᵀ + b, labels, weights, ignore_index)
    LinearCrossEntropyGrad(dy, x, w, b?, labels, weights?) -> dx, dw, db

Scores [n, c] of a vocabulary are larger than all else in a step. The kernels compute them for some rows at a time.
Backward recomputes them; or forward computes the gradients too, for dloss = 1, while it has the logits: `gradients`
says which (`passes.compute_loss_gradients_in_forward`). `output_type` is the type of the softmax and the loss where it
is wider than that of x.

Source: Hsu et al. 2024, https://arxiv.org/abs/2410.10989 (section 3.2, chunked linear cross entropy).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, dtype_of, type_of
from onnxtrain.ops.constructors import TORCH_DTYPES, cast
from onnxtrain.ops.cost_model import Shapes, expected_seconds
from onnxtrain.ops.definition import Call, Gradient, Kernel, NodeView
from onnxtrain.ops.fused import flags, fused, masked, only_first, total, wanted
from onnxtrain.ops.loss.reduction import number_of
from onnxtrain.ops.matmul.candidates import convolves, in_onednn, onednn_product, product_by_convolution
from onnxtrain.system.machine import Machine

Tensor = torch.Tensor

# As few rows as keep products fast, as many as keep scores small: 64 MB in float32, 524 rows of 32 000 classes.
_MOST_SCORES = 1 << 24
_FEWEST_ROWS = 128


@dataclass(frozen=True)
class Products:
    """How one library multiplies.

    Attributes:
        plain: a[r, k] @ b[k, n] + bias.
        add_transposed: adds aᵀ @ b of a[r, n] and b[r, k] to the first argument.
    """

    plain: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    add_transposed: Callable[[Tensor, Tensor, Tensor], Tensor]


def _aten_plain(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def _aten_add_transposed(into: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if into.dtype == a.dtype:
        return into.addmm_(a.t(), b)
    return into.add_(torch.mm(a.t(), b))


ATEN = Products(_aten_plain, _aten_add_transposed)
ONEDNN = Products(
    lambda a, b, bias: onednn_product(a, b, bias, 1.0),
    lambda into, a, b: into.add_(product_by_convolution(a, b, 1.0)),
)


class _Rows(NamedTuple):
    """What the labels say of each row.

    Attributes:
        labels: 0 in place of one that is ignored.
        weights: the weight of the row in the sum of all losses, 0 where ignored.
        factors: the gradient of the loss in the row's own.
        divisor: what the sum is divided by.
    """

    labels: Tensor
    weights: Tensor
    factors: Tensor
    divisor: Tensor | int


def _rows(
    labels: Tensor, weights: Tensor | None, ignore_index: int | None, mean: bool, dtype: torch.dtype, dy: Tensor | None
) -> _Rows:
    ignored = torch.zeros_like(labels, dtype=torch.bool) if ignore_index is None else labels == ignore_index
    known = labels.masked_fill(ignored, 0)
    each = torch.ones_like(labels, dtype=dtype) if weights is None else weights.to(dtype).index_select(0, known)
    each.masked_fill_(ignored, 0)
    divisor = each.sum() if mean else 1
    factors = (each / divisor).masked_fill_(ignored, 0)  # with no label at all the loss is NaN, and gradients are 0
    return _Rows(known, each, factors if dy is None else factors * dy.to(dtype), divisor)


def linear_cross_entropy(x: Tensor, w: Tensor, *how: Any) -> Tensor:
    """The loss; see `linear_cross_entropy_with_gradients`."""
    return linear_cross_entropy_with_gradients(x, w, *how, mask=(False, False, False))[0]


def linear_cross_entropy_backward(
    dy: Tensor, x: Tensor, w: Tensor, *how: Any, mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients; see `linear_cross_entropy_with_gradients`."""
    return linear_cross_entropy_with_gradients(x, w, *how, mask=mask, dy=dy)[1:]


def linear_cross_entropy_with_gradients(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    labels: Tensor,
    weights: Tensor | None,
    reduction: int,
    ignore_index: int | None,
    dtype: torch.dtype,
    products: Products,
    *,
    mask: Sequence[bool],
    dy: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The loss, and those gradients of x, w and b that `mask` names, for dloss = `dy` (1 where None).

    Sums over rows are kept in `dtype`, also where x is narrower.
    """
    rows = _rows(labels, weights, ignore_index, reduction == 1, dtype, dy)
    count, classes = x.size(0), w.size(0)
    loss = torch.zeros((), dtype=dtype, device=x.device)
    dx = torch.empty_like(x) if mask[0] else None
    dw = torch.zeros_like(w, dtype=dtype) if mask[1] else None
    db = torch.zeros(classes, dtype=dtype, device=x.device) if mask[2] else None
    step = max(_FEWEST_ROWS, _MOST_SCORES // max(1, classes) // _FEWEST_ROWS * _FEWEST_ROWS)
    for start in range(0, count, step):
        part = slice(start, start + step)
        each, softmax = _losses(products.plain(x[part], w.t(), b).to(dtype), rows.labels[part], any(mask))
        loss += torch.where(rows.weights[part] == 0, 0, each * rows.weights[part]).sum()
        if softmax is None:
            continue
        dscores = _score_gradients(softmax, rows.labels[part], rows.factors[part]).to(x.dtype)
        if dx is not None:
            dx[part] = products.plain(dscores, w, None)
        if dw is not None:
            products.add_transposed(dw, dscores, x[part])
        if db is not None:
            db += dscores.sum(0, dtype=dtype)
    if dw is not None:
        dw = dw.to(w.dtype)
    return loss / rows.divisor, dx, dw, None if db is None else db.to(w.dtype)


def _losses(scores: Tensor, labels: Tensor, keep: bool) -> tuple[Tensor, Tensor | None]:
    """-log softmax at each label; and, in the memory of the scores, their softmax where it is to be kept."""
    at_label = scores.gather(1, labels[:, None])
    if not keep:
        return (torch.logsumexp(scores, 1, keepdim=True) - at_label).squeeze(1), None
    highest = scores.amax(1, keepdim=True)
    powers = scores.sub_(highest).exp_()
    sums = powers.sum(1, keepdim=True)
    losses = sums.log().add_(highest).sub_(at_label).squeeze(1)
    return losses, powers.div_(sums)


def _score_gradients(softmax: Tensor, labels: Tensor, factors: Tensor) -> Tensor:
    """The softmax less 1 at the label, times the row's factor: in place."""
    factor, label = factors[:, None], labels[:, None]
    at_label = (softmax.gather(1, label) - 1) * factor
    return softmax.mul_(factor).scatter_(1, label, at_label)


# Bodies


def _scores(op: Builder, n: NodeView) -> ir.Value:
    product: ir.Value = op.MatMul(n.x, op.Transpose(n.w, perm=[1, 0]))
    return cast(op, product if n.b is None else op.Add(product, n.b), _dtype(n))


def _ignored(op: Builder, n: NodeView) -> ir.Value | None:
    return None if n.ignore_index is None else op.scalar(n.ignore_index, ir.DataType.INT64)


def _losses_of(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value, ir.Value]:
    found: tuple[ir.Value, ir.Value, ir.Value] = op.ms.SoftmaxCrossEntropyLossInternal(
        _scores(op, n), n.labels, n.weights, _ignored(op, n), reduction=n.reduction
    )
    return found


def _gradients_of(op: Builder, n: NodeView, dy: ir.Value, log_prob: ir.Value, total_weight: ir.Value) -> list[ir.Value]:
    dscores = op.ms.SoftmaxCrossEntropyLossInternalGrad(
        dy, log_prob, n.labels, n.weights, _ignored(op, n), None, total_weight, reduction=n.reduction
    )
    dscores = cast(op, dscores, dtype_of(n.x))
    return [
        op.MatMul(dscores, n.w),
        op.MatMul(op.Transpose(dscores, perm=[1, 0]), n.x),
        total(op, dscores, (0,), keepdims=False),
    ]


def _body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    loss, log_prob, total_weight = _losses_of(op, n)
    if not any(n.gradients):
        return [loss]
    return [loss, *_gradients_of(op, n, op.scalar(1, like=loss), log_prob, total_weight)]


def _grad_body(op: Builder, n: NodeView) -> Sequence[ir.Value]:
    _, log_prob, total_weight = _losses_of(op, n)
    return _gradients_of(op, n, n.dy, log_prob, total_weight)


# Types and costs


def _dtype(n: NodeView) -> ir.DataType:
    """The type of the softmax and the loss."""
    return dtype_of(n.x) if n.output_type is None else ir.DataType(n.output_type)


def _check(n: NodeView) -> None:
    shapes = [sizes.dims_of(v) for v in (n.x, n.w, n.labels)]
    if [len(s) for s in shapes] != [2, 2, 1] or n.reduction == "none":
        raise GraphError(
            f"{n.definition.name} takes x[n, h], w[c, h] and labels[n], and gives one number",
            got=f"{', '.join(map(str, shapes))}, reduction {n.reduction}",
        )


def _gradient_types(n: NodeView) -> tuple[TensorType, ...]:
    return type_of(n.x), type_of(n.w), TensorType(dtype_of(n.w), sizes.dims_of(n.w)[:1])


def _types(n: NodeView) -> Sequence[TensorType]:
    _check(n)
    loss = TensorType(_dtype(n), ())
    return (loss, *_gradient_types(n)) if any(n.gradients) else (loss,)


def _grad_types(n: NodeView) -> Sequence[TensorType]:
    _check(n)
    return _gradient_types(n)


def _flops(products: Callable[[NodeView], int]) -> Callable[[NodeView], sizes.Size]:
    """Two for each product, and eight for each score."""

    def flops(n: NodeView) -> sizes.Size:
        (rows, inner), classes = sizes.dims_of(n.x), sizes.dims_of(n.w)[0]
        return sizes.multiply(rows, classes, sizes.add(8, sizes.multiply(2 * products(n), inner)))

    return flops


def _forward_products(n: NodeView) -> int:
    return 1 + int(sum(n.gradients[:2]))


def _backward_products(n: NodeView) -> int:
    return 1 + int(sum(n.output_mask[:2]))


# Kernels


def _lower_loss(products: Products) -> Callable[..., Call]:
    def lower(n: NodeView, *operands: Any) -> Call:
        if not any(n.gradients):
            return Call(linear_cross_entropy, *operands, *_how(n, products))
        return Call(linear_cross_entropy_with_gradients, *operands, *_how(n, products), mask=flags(n.gradients))

    return lower


def _lower_backward(products: Products) -> Callable[..., Call]:
    return lambda n, *operands: Call(
        linear_cross_entropy_backward, *operands, *_how(n, products), mask=flags(n.output_mask)
    )


def _how(n: NodeView, products: Products) -> tuple[Any, ...]:
    return number_of(n.reduction), n.ignore_index, TORCH_DTYPES[_dtype(n)], products


def _seconds(*ways: str) -> Callable[[NodeView, Shapes, Machine], float]:
    """The cost model of a library; `ways` are its speeds for scores, for dx and for dw."""

    def seconds(n: NodeView, shapes: Shapes, machine: Machine) -> float:
        x, w = (shapes[n.definition.inputs.index(name)] for name in ("x", "w"))
        mask = n.gradients if "gradients" in n.definition.attributes else n.output_mask
        asked = [way for way, there in zip(ways, (1, *mask[:2]), strict=True) if there]
        dtype = TORCH_DTYPES[dtype_of(n.x)]
        return sum(expected_seconds(way, 2.0 * math.prod(x) * w[0], machine, dtype) for way in asked)

    return seconds


_ATEN_SECONDS = _seconds("aten", "aten", "aten")


def _onednn(lower: Callable[[Products], Callable[..., Call]]) -> tuple[Kernel, ...]:
    return (
        Kernel(
            lower=lower(ONEDNN),
            name="onednn",
            seconds=_seconds("onednn", "onednn", "convolution"),
            # Its dw is a product by convolution.
            applies=lambda n, device: device == "cpu" and in_onednn(dtype_of(n.x)) and convolves(),
        ),
    )


# The ops


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> list[ir.Value | None]:
    mask = wanted(n, "x", "w", "b")
    operands = (n.x, n.w, n.b, n.labels, n.weights)
    how = {name: getattr(n, name) for name in _HOW}
    found = op.own.LinearCrossEntropyGrad(only_first(n, cotangents), *operands, **how, output_mask=mask)
    return masked(found, mask, n)


_OPERANDS = ("x", "w", "b?", "labels", "weights?")
_HOW: dict[str, Any] = {"reduction": "mean", "ignore_index": None, "output_type": None}

LINEAR_CROSS_ENTROPY = fused(
    OWN,
    "LinearCrossEntropy",
    _OPERANDS,
    ("loss", "dx?", "dw?", "db?"),
    attributes={**_HOW, "gradients": (0, 0, 0)},
    shapes=_types,
    body=_body,
    gradient=(Gradient(_gradient, reads=("x", "w", "b", "labels", "weights")),),
    nondiff_inputs=frozenset({"labels", "weights"}),
    lower=_lower_loss(ATEN),
    others=_onednn(_lower_loss),
    seconds=_ATEN_SECONDS,
    axes=lambda n: NO_AXES,
    flops=_flops(_forward_products),
    count_outputs=lambda inputs, attributes: 4 if any(attributes.get("gradients", ())) else 1,
)
LINEAR_CROSS_ENTROPY_GRAD = fused(
    OWN,
    "LinearCrossEntropyGrad",
    ("dy", *_OPERANDS),
    ("dx", "dw", "db"),
    attributes={**_HOW, "output_mask": (1, 1, 1)},
    shapes=_grad_types,
    body=_grad_body,
    lower=_lower_backward(ATEN),
    others=_onednn(_lower_backward),
    seconds=_ATEN_SECONDS,
    axes=lambda n: NO_AXES,
    flops=_flops(_backward_products),
)
