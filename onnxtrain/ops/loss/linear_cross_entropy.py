"""A linear layer and the cross entropy of its logits in one op, which never materializes all logits.

    LinearCrossEntropy(x[n, h], w[c, h], b[c]?, labels[n], weights[c]?) -> loss, dx?, dw?, db?
        loss = SoftmaxCrossEntropyLossInternal(x @ wᵀ + b, labels, weights, ignore_index)
    LinearCrossEntropyGrad(dy, x, w, b?, labels, weights?) -> dx, dw, db

The logits [n, c] of a vocabulary are the largest tensor of a training step. The kernels compute them in chunks of
rows. Backward recomputes them; or forward computes the gradients too, for dloss = 1, while it has the logits:
`gradients` says which ones (`passes.compute_loss_gradients_in_forward`). `output_type` is the dtype of the softmax and
the loss if it is wider than that of x.

Source: Hsu et al. 2024, https://arxiv.org/abs/2410.10989 (section 3.2, chunked linear cross entropy).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, dtype_of, type_of
from onnxtrain.ops.body_parts import cast, sum_over
from onnxtrain.ops.constructors import define_pure
from onnxtrain.ops.cost_model import Shapes, expected_seconds
from onnxtrain.ops.definition import Call, Gradient, Kernel, NodeView
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.gradient_masks import apply_output_mask, as_bools, first_cotangent, output_mask
from onnxtrain.ops.loss.reduction import aten_reduction
from onnxtrain.ops.loss.row_losses import RowFunction, rows_by_pytorch, rows_by_triton
from onnxtrain.ops.matmul.aligned import missing, padded, pads_vocabulary
from onnxtrain.ops.matmul.candidates import gemm_by_convolution, may_use_convolution, onednn_gemm, onednn_supports
from onnxtrain.ops.native_kernels import may_run_triton
from onnxtrain.system.machine import Machine

Tensor = torch.Tensor

# A chunk has enough rows for fast GEMMs and few enough for small logits: 64 MB in float32, 524 rows of 32 000 classes.
_CHUNK_LOGITS = 1 << 24
_MIN_CHUNK_ROWS = 128


@dataclass(frozen=True)
class GemmLibrary:
    """The GEMMs of one library.

    Attributes:
        gemm: a[r, k] @ b[k, n] + bias.
        add_transposed: adds aᵀ @ b of a[r, n] and b[r, k] to the first argument, in place.
        pads: whether the classes are padded to an aligned number; see `ops.matmul.aligned`.
        rows: computes losses, and gradients of logits.
    """

    gemm: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    add_transposed: Callable[[Tensor, Tensor, Tensor], Tensor]
    pads: bool = False
    rows: RowFunction = rows_by_pytorch


def _aten_gemm(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def _aten_add_transposed(result: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if result.dtype == a.dtype:
        return result.addmm_(a.t(), b)
    return result.add_(torch.mm(a.t(), b))


ATEN = GemmLibrary(_aten_gemm, _aten_add_transposed)
PADDED = replace(ATEN, pads=True)
ONEDNN = GemmLibrary(
    lambda a, b, bias: onednn_gemm(a, b, bias, 1.0),
    lambda result, a, b: result.add_(gemm_by_convolution(a, b, 1.0)),
)


class _Rows(NamedTuple):
    """Labels and weights of the rows.

    Attributes:
        labels: the class indices, 0 for ignored rows.
        weights: the weight of each row in the sum of all losses, 0 for ignored rows.
        factors: the derivative of the reduced loss in each row's loss.
        divisor: the divisor of the sum.
    """

    labels: Tensor
    weights: Tensor
    factors: Tensor
    divisor: Tensor | int


def _rows(
    labels: Tensor, weights: Tensor | None, ignore_index: int | None, mean: bool, dtype: torch.dtype, dy: Tensor | None
) -> _Rows:
    ignored = torch.zeros_like(labels, dtype=torch.bool) if ignore_index is None else labels == ignore_index
    class_indices = labels.masked_fill(ignored, 0)
    if weights is None:
        row_weights = torch.ones_like(labels, dtype=dtype)
    else:
        row_weights = weights.to(dtype).index_select(0, class_indices)
    row_weights.masked_fill_(ignored, 0)
    divisor = row_weights.sum() if mean else 1
    factors = (row_weights / divisor).masked_fill_(ignored, 0)  # if all are ignored: the loss is NaN, gradients are 0
    return _Rows(class_indices, row_weights, factors if dy is None else factors * dy.to(dtype), divisor)


def linear_cross_entropy(x: Tensor, w: Tensor, *arguments: Any) -> Tensor:
    """Return the loss; see `linear_cross_entropy_with_gradients`."""
    return linear_cross_entropy_with_gradients(x, w, *arguments, mask=(False, False, False))[0]


def linear_cross_entropy_backward(
    dy: Tensor, x: Tensor, w: Tensor, *arguments: Any, mask: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the gradients; see `linear_cross_entropy_with_gradients`."""
    return linear_cross_entropy_with_gradients(x, w, *arguments, mask=mask, dy=dy)[1:]


def linear_cross_entropy_with_gradients(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    labels: Tensor,
    weights: Tensor | None,
    reduction: int,
    ignore_index: int | None,
    dtype: torch.dtype,
    library: GemmLibrary,
    *,
    mask: Sequence[bool],
    dy: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the loss, and the gradients of x, w and b selected by `mask`, for dloss = `dy` (1 if None).

    Sums over rows are accumulated in `dtype`, even if x is narrower.
    """
    rows = _rows(labels, weights, ignore_index, reduction == 1, dtype, dy)
    count, classes = x.size(0), w.size(0)
    loss = torch.zeros((), dtype=dtype, device=x.device)
    if library.pads:
        w = padded(w, missing(classes), 0)
        b = None if b is None else torch.nn.functional.pad(b, (0, missing(classes)))
    dx = torch.empty_like(x) if mask[0] else None
    dw = torch.zeros_like(w, dtype=dtype) if mask[1] else None
    db = torch.zeros(w.size(0), dtype=dtype, device=x.device) if mask[2] else None
    step = max(_MIN_CHUNK_ROWS, _CHUNK_LOGITS // max(1, classes) // _MIN_CHUNK_ROWS * _MIN_CHUNK_ROWS)
    for start in range(0, count, step):
        chunk = slice(start, start + step)
        factors = rows.factors[chunk] if any(mask) else None
        row_losses, dlogits = library.rows(
            library.gemm(x[chunk], w.t(), b), classes, rows.labels[chunk], factors, dtype
        )
        loss += torch.where(rows.weights[chunk] == 0, 0, row_losses * rows.weights[chunk]).sum()
        if dlogits is None:
            continue
        if dx is not None:
            dx[chunk] = library.gemm(dlogits, w, None)
        if dw is not None:
            library.add_transposed(dw, dlogits, x[chunk])
        if db is not None:
            db += dlogits.sum(0, dtype=dtype)
    return loss / rows.divisor, dx, _of_classes(dw, classes, w.dtype), _of_classes(db, classes, w.dtype)


def _of_classes(gradient: Tensor | None, classes: int, dtype: torch.dtype) -> Tensor | None:
    """Return a gradient without the padded classes."""
    if gradient is None:
        return None
    return (gradient if gradient.size(0) == classes else gradient[:classes]).to(dtype)


# Bodies


def _logits(op: Builder, n: NodeView) -> ir.Value:
    logits: ir.Value = op.MatMul(n.x, op.Transpose(n.w, perm=[1, 0]))
    return cast(op, logits if n.b is None else op.Add(logits, n.b), _dtype(n))


def _ignored(op: Builder, n: NodeView) -> ir.Value | None:
    return None if n.ignore_index is None else op.scalar(n.ignore_index, ir.DataType.INT64)


def _losses_of(op: Builder, n: NodeView) -> tuple[ir.Value, ir.Value, ir.Value]:
    return op.ms.SoftmaxCrossEntropyLossInternal(
        _logits(op, n), n.labels, n.weights, _ignored(op, n), reduction=n.reduction
    )


def _gradients_of(op: Builder, n: NodeView, dy: ir.Value, log_prob: ir.Value, total_weight: ir.Value) -> list[ir.Value]:
    dlogits = op.ms.SoftmaxCrossEntropyLossInternalGrad(
        dy, log_prob, n.labels, n.weights, _ignored(op, n), None, total_weight, reduction=n.reduction
    )
    dlogits = cast(op, dlogits, dtype_of(n.x))
    return [
        op.MatMul(dlogits, n.w),
        op.MatMul(op.Transpose(dlogits, perm=[1, 0]), n.x),
        sum_over(op, dlogits, (0,), keepdims=False),
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
    """Return the dtype of the softmax and the loss."""
    return dtype_of(n.x) if n.output_type is None else ir.DataType(n.output_type)


def _check(n: NodeView) -> None:
    shapes = [sizes.dims_of(v) for v in (n.x, n.w, n.labels)]
    if [len(s) for s in shapes] != [2, 2, 1] or n.reduction == "none":
        raise GraphError(
            f"{n.definition.name} got inputs of unsupported ranks, or no reduction",
            expected="x[n, h], w[c, h] and labels[n], with reduction mean or sum",
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


def _flops(gemms: Callable[[NodeView], int]) -> Callable[[NodeView], sizes.Size]:
    """Eight per logit, and two per multiply-add of each GEMM."""

    def flops(n: NodeView) -> sizes.Size:
        (rows, inner), classes = sizes.dims_of(n.x), sizes.dims_of(n.w)[0]
        return sizes.multiply(rows, classes, sizes.add(8, sizes.multiply(2 * gemms(n), inner)))

    return flops


def _forward_gemms(n: NodeView) -> int:
    return 1 + int(sum(n.gradients[:2]))


def _backward_gemms(n: NodeView) -> int:
    return 1 + int(sum(n.output_mask[:2]))


# Kernels


def _lower_loss(library: GemmLibrary) -> Callable[..., Call]:
    def lower(n: NodeView, *operands: Any) -> Call:
        if not any(n.gradients):
            return Call(linear_cross_entropy, *operands, *_settings(n, library))
        return Call(linear_cross_entropy_with_gradients, *operands, *_settings(n, library), mask=as_bools(n.gradients))

    return lower


def _lower_backward(library: GemmLibrary) -> Callable[..., Call]:
    return lambda n, *operands: Call(
        linear_cross_entropy_backward, *operands, *_settings(n, library), mask=as_bools(n.output_mask)
    )


def _settings(n: NodeView, library: GemmLibrary) -> tuple[Any, ...]:
    return aten_reduction(n.reduction), n.ignore_index, TORCH_DTYPES[_dtype(n)], library


def _seconds(*speeds: str) -> Callable[[NodeView, Shapes, Machine], float]:
    """Return the cost model of a library; `speeds` name the machine's GEMM speeds for the logits, dx and dw."""

    def seconds(n: NodeView, shapes: Shapes, machine: Machine) -> float:
        x, w = (shapes[n.definition.inputs.index(name)] for name in ("x", "w"))
        mask = n.gradients if "gradients" in n.definition.attributes else n.output_mask
        used = [speed for speed, computed in zip(speeds, (1, *mask[:2]), strict=True) if computed]
        dtype = TORCH_DTYPES[dtype_of(n.x)]
        return sum(expected_seconds(speed, 2.0 * math.prod(x) * w[0], machine, dtype) for speed in used)

    return seconds


_ATEN_SECONDS = _seconds("aten", "aten", "aten")


def _on_gpu(lower: Callable[[GemmLibrary], Callable[..., Call]]) -> tuple[Kernel, ...]:
    """Return the kernels for a GPU, which pad the vocabulary or run rows by Triton, or both."""

    def pads(n: NodeView, device: str) -> bool:
        return pads_vocabulary(device, dtype_of(n.x), *sizes.dims_of(n.w))

    def runs_triton(n: NodeView, device: str) -> bool:
        return may_run_triton(n, device) and _dtype(n) == ir.DataType.FLOAT

    return (
        Kernel(
            lower=lower(replace(PADDED, rows=rows_by_triton)),
            applies=lambda n, device: pads(n, device) and runs_triton(n, device),
        ),
        Kernel(lower=lower(PADDED), applies=pads),
        Kernel(lower=lower(replace(ATEN, rows=rows_by_triton)), applies=runs_triton),
    )


def _onednn(lower: Callable[[GemmLibrary], Callable[..., Call]]) -> tuple[Kernel, ...]:
    return (
        Kernel(
            lower=lower(ONEDNN),
            name="onednn",
            seconds=_seconds("onednn", "onednn", "convolution"),
            # dw is computed as a convolution.
            applies=lambda n, device: device == "cpu" and onednn_supports(dtype_of(n.x)) and may_use_convolution(),
        ),
    )


# The ops


def _gradient(op: Builder, n: NodeView, *cotangents: ir.Value | None) -> list[ir.Value | None]:
    mask = output_mask(n, "x", "w", "b")
    operands = (n.x, n.w, n.b, n.labels, n.weights)
    attributes = {name: getattr(n, name) for name in _ATTRIBUTES}
    gradients = op.own.LinearCrossEntropyGrad(first_cotangent(n, cotangents), *operands, **attributes, output_mask=mask)
    return apply_output_mask(gradients, mask, n)


_OPERANDS = ("x", "w", "b?", "labels", "weights?")
_ATTRIBUTES: dict[str, Any] = {"reduction": "mean", "ignore_index": None, "output_type": None}

LINEAR_CROSS_ENTROPY = define_pure(
    OWN,
    "LinearCrossEntropy",
    _OPERANDS,
    ("loss", "dx?", "dw?", "db?"),
    attributes={**_ATTRIBUTES, "gradients": (0, 0, 0)},
    shapes=_types,
    body=_body,
    gradient=(Gradient(_gradient, reads=("x", "w", "b", "labels", "weights")),),
    nondiff_inputs=frozenset({"labels", "weights"}),
    kernels=_on_gpu(_lower_loss),
    lower=_lower_loss(ATEN),
    others=_onednn(_lower_loss),
    seconds=_ATEN_SECONDS,
    axes=lambda n: NO_AXES,
    flops=_flops(_forward_gemms),
    count_outputs=lambda inputs, attributes: 4 if any(attributes.get("gradients", ())) else 1,
)
LINEAR_CROSS_ENTROPY_GRAD = define_pure(
    OWN,
    "LinearCrossEntropyGrad",
    ("dy", *_OPERANDS),
    ("dx", "dw", "db"),
    attributes={**_ATTRIBUTES, "output_mask": (1, 1, 1)},
    shapes=_grad_types,
    body=_grad_body,
    kernels=_on_gpu(_lower_backward),
    lower=_lower_backward(ATEN),
    others=_onednn(_lower_backward),
    seconds=_ATEN_SECONDS,
    axes=lambda n: NO_AXES,
    flops=_flops(_backward_gemms),
)
