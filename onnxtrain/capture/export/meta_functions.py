"""Meta functions of frequent operators, which are faster than PyTorch's reference functions.

The export runs every operator on fake tensors to learn the dtype, shape and strides of its result. PyTorch runs
reference functions, which compose the operator of others that each check strides, broadcast and promote dtypes: 5 ms
for a dropout, 1.3 ms for a copy, and a T5 of six layers has 800 such calls. Together the functions here save a quarter
of a first step, and half of a CNN's. They cover operands of one dtype that are contiguous or whose strides' expressions
determine the result's strides, and views. An operator that would save less than 0.5 % of each measured model has none.

They return None for any other call: operands of other kinds, on several devices or with known elements, sizes that are
equal only under a guard, invalid axes. PyTorch then computes the result, or raises the error.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from onnxtrain.capture.export.fake_tensors import FLOATING, REAL, Fakes, broadcast_shape, is_one, is_same
from onnxtrain.capture.node_storage import example_size
from onnxtrain.torch_compat.aten_operators import (
    LOG_SOFTMAX,
    NATIVE_BATCH_NORM,
    NATIVE_BATCH_NORM_FUNCTIONAL,
    NATIVE_BATCH_NORM_NO_TRAINING,
    TO_COPY,
    UNSAFE_VIEW,
)
from onnxtrain.torch_compat.fake_tensors import FakeTensor, FakeTensorMode, contiguous_strides, has_symbolic_sizes
from onnxtrain.torch_compat.patch_points import FAKE_DISPATCH

_ATEN = torch.ops.aten

# Takes Fakes and the operator's arguments.
MetaFunction: TypeAlias = "Callable[..., FakeTensor | tuple[FakeTensor, ...] | torch.device | None]"


@contextmanager
def fast_meta_functions() -> Iterator[None]:
    """Use these meta functions on this thread. The caller must hold the capture lock."""
    owner, original = threading.get_ident(), FAKE_DISPATCH.original

    def dispatch(
        self: FakeTensorMode,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        meta_function = META_FUNCTIONS.get(func)
        if meta_function is not None and threading.get_ident() == owner:
            result = meta_function(Fakes(self), *args, **(kwargs or {}))
            if result is not None:
                return result
        return original(self, func, types, args, kwargs or {})

    with FAKE_DISPATCH.wrapped(lambda _: dispatch):
        yield


def _unary(fakes: Fakes, x: Any, kind: Any = FLOATING, dtype: torch.dtype | None = None) -> FakeTensor | None:
    """Infer the result of an elementwise operator of one tensor."""
    return fakes.elementwise([x], x.shape, dtype or x.dtype) if fakes.are_supported(x, dtype=kind) else None


def _like_contiguous(fakes: Fakes, x: Any, kind: Any = FLOATING, dtype: torch.dtype | None = None) -> FakeTensor | None:
    """Return a result with the shape of a contiguous operand."""
    return fakes.like(x, dtype=dtype) if fakes.are_supported(x, dtype=kind) and fakes.has_default_strides(x) else None


def _unary_real(fakes: Fakes, x: Any) -> FakeTensor | None:
    return _unary(fakes, x, REAL)


def _gelu(fakes: Fakes, x: Any, approximate: str = "none") -> FakeTensor | None:
    return _like_contiguous(fakes, x)


def _pow(fakes: Fakes, x: Any, exponent: Any) -> FakeTensor | None:
    return _unary(fakes, x) if type(exponent) in (int, float) else None


def _binary(fakes: Fakes, x: Any, y: Any, alpha: Any = 1) -> FakeTensor | None:
    """`alpha` scales `y`; a Python scalar must not promote the dtype of `x`."""
    scalars = [value for value in (y, alpha) if not isinstance(value, torch.Tensor)]
    if any(type(value) not in (int, float) for value in scalars):
        return None
    if float in map(type, scalars) and not fakes.are_supported(x):
        return None
    return _broadcast(fakes, x, y, kind=REAL) if isinstance(y, torch.Tensor) else _unary_real(fakes, x)


def _divide(fakes: Fakes, x: Any, y: Any) -> FakeTensor | None:
    return _binary(fakes, x, y) if fakes.are_supported(x) else None


def _compare(fakes: Fakes, x: Any, y: Any) -> FakeTensor | None:
    if isinstance(y, torch.Tensor):
        return _broadcast(fakes, x, y, kind=REAL, dtype=torch.bool)
    return _unary(fakes, x, REAL, torch.bool) if type(y) in (int, float) else None


def _logical(fakes: Fakes, x: Any, y: Any) -> FakeTensor | None:
    return _broadcast(fakes, x, y, kind=torch.bool)


def _where(fakes: Fakes, condition: Any, x: Any, y: Any) -> FakeTensor | None:
    return _broadcast(fakes, x, y, condition, kind=None) if fakes.are_supported(condition, dtype=torch.bool) else None


def _broadcast(
    fakes: Fakes, x: Any, y: Any, *others: FakeTensor, kind: Any = FLOATING, dtype: torch.dtype | None = None
) -> FakeTensor | None:
    """Support two tensors of this kind and one dtype; `others` only take part in broadcasting."""
    if not fakes.are_supported(x, y, dtype=kind) or x.dtype != y.dtype:
        return None
    if any(t.fake_device != x.fake_device for t in others):
        return None
    shape = broadcast_shape([t.shape for t in (x, y, *others)])
    return None if shape is None else fakes.elementwise([x, y], shape, dtype or x.dtype, others)


def _clone(fakes: Fakes, x: Any, *, memory_format: torch.memory_format | None = None) -> FakeTensor | None:
    if memory_format is torch.contiguous_format:
        return fakes.like(x) if fakes.are_supported(x, dtype=None) else None
    if memory_format not in (None, torch.preserve_format) or not fakes.are_supported(x, dtype=None):
        return None
    if any(map(is_one, x.shape)) or not has_symbolic_sizes(x):
        return _like_contiguous(fakes, x, None)
    return fakes.elementwise([x], x.shape, x.dtype)  # a dense tensor keeps its strides; any other gets these, too


def _cast(
    fakes: Fakes, x: Any, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **kwargs: Any
) -> FakeTensor | None:
    is_supported = fakes.are_supported(x, dtype=None) and _is_on_device(x, device)
    return None if any(kwargs.values()) or not is_supported else _like_contiguous(fakes, x, None, dtype)


def _is_on_device(x: FakeTensor, device: torch.device | None) -> bool:
    return device is None or device == x.fake_device


def _dropout(fakes: Fakes, x: Any, p: float, train: bool | None) -> tuple[FakeTensor, ...] | None:
    y = _like_contiguous(fakes, x) if train and 0 < p < 1 else None
    return None if y is None else (y, fakes.like(x, dtype=torch.bool))


def _batch_norm(fakes: Fakes, x: Any, weight: Any, bias: Any, *rest: Any) -> tuple[FakeTensor, ...] | None:
    """In training: y, mean and inverse deviation. `rest`: running mean and variance, training, momentum, epsilon."""
    vectors = [t for t in (weight, bias, *rest[:-3]) if t is not None]
    if not rest[-3] or not fakes.are_supported(x, *vectors) or any(t.dtype != x.dtype for t in vectors) or x.dim() < 2:
        return None
    if x.dtype not in (torch.float32, torch.float64) or not fakes.has_default_strides(x):
        return None
    if any(t.dim() != 1 or not is_same(t.shape[0], x.shape[1]) for t in vectors):
        return None
    return fakes.like(x), fakes.like(x, x.shape[1:2]), fakes.like(x, x.shape[1:2])


def is_channels_last(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Decide as the kernels do (`is_channels_last_strides` in c10/core/MemoryFormat.h), by sizes of the call."""
    least = 0
    for axis in (1, *range(len(shape) - 1, 1, -1), 0) if len(shape) in (4, 5) and strides[1] else ():
        if shape[axis] == 0 or strides[axis] < least or (axis == 0 and least == strides[1]):
            return False
        least = strides[axis] * max(shape[axis], 1)
    return least > 0


def _channels_last_strides(x: FakeTensor) -> tuple[Any, ...]:
    batch, channels, *image = x.shape
    first, *strides, last = contiguous_strides((batch, *image, channels))
    return first, last, *strides


def _is_dense_channels_last(x: FakeTensor) -> bool:
    """Return whether `x` has the strides of channels-last wherever a size is not 1."""
    return x.dim() in (4, 5) and _has_strides(x, _channels_last_strides(x))


def _has_strides(x: FakeTensor, strides: Sequence[Any]) -> bool:
    """Return whether `x` has these strides wherever a size is not 1."""
    axes = zip(x.shape, x.stride(), strides, strict=True)
    return all(is_one(size) or is_same(actual, expected) for size, actual, expected in axes)


def _in_suggested_format(fakes: Fakes, x: Any) -> FakeTensor | None:
    """Return a tensor like `x`, contiguous or channels-last as the kernels for CPUs choose; None for other operands."""
    if not fakes.are_supported(x, dtype=None) or x.fake_device.type != "cpu" or fakes.has_default_strides(x):
        return None
    if is_channels_last(list(map(example_size, x.shape)), list(map(example_size, x.stride()))):
        return fakes.like(x, strides=_channels_last_strides(x))
    return fakes.like(x)


def _batch_norm_of(operator: Any, meta_function: MetaFunction = lambda *arguments: None) -> MetaFunction:
    """Make the meta function of a batch norm whose kernel for CPUs gives the result a format that it chooses.

    PyTorch's meta function gives it the strides of `x`: a `reshape` would copy where it is a view, and a write through
    it would be lost.
    """

    def infer(fakes: Fakes, x: Any, *rest: Any) -> Any:
        like_result = _in_suggested_format(fakes, x)
        if like_result is not None and _has_strides(x, contiguous_strides(x.shape)):
            like_result = fakes.like(x)  # images of one pixel, or channel, have both formats: the kernel sees this one
        elif like_result is None or _is_dense_channels_last(x):  # PyTorch's is right there
            return meta_function(fakes, x, *rest)
        with fakes.mode:
            return operator(like_result, *rest)

    return infer


def _roll(fakes: Fakes, x: Any, shifts: Any, dims: Any = ()) -> FakeTensor | None:
    """The kernel for CPUs keeps channels-last; PyTorch's meta function does not."""
    return _in_suggested_format(fakes, x) if dims else None


def _functional_batch_norm(fakes: Fakes, x: Any, *rest: Any) -> tuple[FakeTensor, ...] | None:
    """Return the results of `_batch_norm`, and the updated running mean and variance."""
    results = _batch_norm(fakes, x, *rest)
    if results is None or rest[2] is None or rest[3] is None:
        return None
    return *results, fakes.like(rest[2]), fakes.like(rest[3])


def _mean(fakes: Fakes, x: Any, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> FakeTensor | None:
    if (
        not dims
        or dtype is not None
        or not fakes.are_supported(x)
        or not _are_axes(x, *dims)
        or not fakes.has_default_strides(x)
    ):
        return None
    reduced = {d % x.dim() for d in dims}
    shape = [1 if d in reduced else size for d, size in enumerate(x.shape) if keepdim or d not in reduced]
    return fakes.like(x, shape) if len(reduced) == len(dims) else None


def _log_softmax(fakes: Fakes, x: Any, axis: int, half_to_float: bool) -> FakeTensor | None:
    return None if half_to_float or not _are_axes(x, axis) else _like_contiguous(fakes, x)


def _cumsum(fakes: Fakes, x: Any, axis: int, *, dtype: torch.dtype | None = None) -> FakeTensor | None:
    if dtype is None:
        dtype = x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.int64
    return _like_contiguous(fakes, x, None, dtype) if _are_axes(x, axis) else None


def _nll_loss(
    fakes: Fakes, x: Any, labels: Any, weight: Any, reduction: int, ignore_index: Any
) -> tuple[FakeTensor, ...] | None:
    """Return the loss of [n, classes] scores and [n] labels as a mean or sum, and the sum of the weights."""
    if not fakes.are_supported(x) or not fakes.are_supported(labels, dtype=torch.int64) or weight is not None:
        return None
    if x.dim() != 2 or labels.dim() != 1 or not is_same(x.shape[0], labels.shape[0]):
        return None
    if labels.fake_device != x.fake_device or reduction not in (1, 2):
        return None
    return fakes.like(x, []), fakes.like(x, [])


def _addmm(fakes: Fakes, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> FakeTensor | None:
    if not fakes.are_supported(bias, a, b) or len({bias.dtype, a.dtype, b.dtype}) > 1:
        return None
    if (bias.dim(), a.dim(), b.dim()) != (1, 2, 2) or not is_same(a.shape[1], b.shape[0]):
        return None
    return fakes.like(a, [a.shape[0], b.shape[1]]) if is_same(bias.shape[0], b.shape[1]) else None


def _cat(fakes: Fakes, tensors: Sequence[Any], axis: int = 0) -> FakeTensor | None:
    """Support tensors of one dtype that agree in all other axes and cannot be channels_last, as the result then is."""
    if not tensors:
        return None
    first = tensors[0]
    if not fakes.are_supported(*tensors, dtype=None) or not _are_axes(first, axis):
        return None
    axis %= first.dim()
    for x in tensors:
        if x.dtype != first.dtype or x.dim() != first.dim() or _may_be_channels_last(x):
            return None
        if any(not is_same(n, m) for d, (n, m) in enumerate(zip(x.shape, first.shape, strict=True)) if d != axis):
            return None
        if isinstance(x.shape[axis], int) and x.shape[axis] == 0:
            return None
    shape = list(first.shape)
    shape[axis] = sum(x.shape[axis] for x in tensors)
    return fakes.like(first, shape)


def _may_be_channels_last(x: FakeTensor) -> bool:
    """Return whether images or volumes may have adjacent channels in memory."""
    if x.dim() not in (4, 5):
        return False
    channels, stride = x.shape[1], x.stride()[1]
    return not isinstance(stride, int) or stride == 1 or not isinstance(channels, int) or channels == 1


def _index(fakes: Fakes, x: Any, indices: Sequence[Any]) -> FakeTensor | None:
    """With one int64 index tensor for each axis."""
    if not fakes.are_supported(x, dtype=None) or len(indices) != x.dim() or any(i is None for i in indices):
        return None
    if not fakes.are_supported(*indices, dtype=torch.int64) or any(i.fake_device != x.fake_device for i in indices):
        return None
    shape = broadcast_shape([i.shape for i in indices])
    return None if shape is None or not has_symbolic_sizes(x) else fakes.like(x, shape)


def _arange(fakes: Fakes, end: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> FakeTensor | None:
    """Up to an int or a symbolic size; PyTorch guards on the sign of an expression that may be negative."""
    if isinstance(end, torch.SymInt):
        bounds = end.node.shape_env.var_to_range.get(end.node.expr)
        is_nonnegative = bounds is not None and bounds.lower >= 0
    else:
        is_nonnegative = type(end) is int and end >= 0
    if not is_nonnegative or device is None or torch.device(device).type == "meta" or any(kwargs.values()):
        return None
    return fakes.new([end], dtype or torch.int64, torch.device(device))


def _device(fakes: Fakes, x: Any) -> torch.device | None:
    return x.fake_device if type(x) is FakeTensor and x.fake_mode is fakes.mode else None


def _are_axes(x: FakeTensor, *axes: int) -> bool:
    return all(-x.dim() <= axis < x.dim() for axis in axes)


def _new_empty(fakes: Fakes, x: Any, size: Sequence[Any], **kwargs: Any) -> FakeTensor | None:
    is_supported = not any(kwargs.values()) and fakes.are_supported(x, dtype=None)
    return fakes.like(x, size) if is_supported and not any(isinstance(n, int) and n < 0 for n in size) else None


# Views


def _transpose(fakes: Fakes, x: Any, first: int, second: int) -> FakeTensor | None:
    if not fakes.are_supported(x, dtype=None) or not _are_axes(x, first, second):
        return None
    perm = list(range(x.dim()))
    perm[first], perm[second] = perm[second], perm[first]
    return _permute(fakes, x, perm)


def _permute(fakes: Fakes, x: Any, perm: Sequence[int]) -> FakeTensor | None:
    if not fakes.are_supported(x, dtype=None) or not _are_axes(x, *perm):
        return None
    if sorted(d % x.dim() for d in perm) != list(range(x.dim())):
        return None
    shape, strides = x.shape, x.stride()
    return fakes.view(x, [shape[d] for d in perm], [strides[d] for d in perm])


def _unsqueeze(fakes: Fakes, x: Any, axis: int) -> FakeTensor | None:
    if not fakes.are_supported(x, dtype=None) or not -x.dim() - 1 <= axis <= x.dim():
        return None
    axis %= x.dim() + 1
    shape, strides = list(x.shape), list(x.stride())
    strides.insert(axis, shape[axis] * strides[axis] if axis < len(shape) else 1)
    return fakes.view(x, [*shape[:axis], 1, *shape[axis:]], strides)


def _expand(fakes: Fakes, x: Any, size: Sequence[Any], *, implicit: bool = False) -> FakeTensor | None:
    new_axes = len(size) - x.dim() if isinstance(x, torch.Tensor) else -1
    if new_axes < 0 or not fakes.are_supported(x, dtype=None):
        return None
    shape = list(size)
    for axis, size_before in enumerate(x.shape, new_axes):
        if isinstance(shape[axis], int) and shape[axis] == -1:
            shape[axis] = size_before
        elif not is_one(size_before) and not is_same(size_before, shape[axis]):
            return None
    return None if any(isinstance(n, int) and n < 0 for n in shape) else fakes.expanded(x, shape)


def _slice(fakes: Fakes, x: Any, axis: int = 0, start: Any = None, end: Any = None, step: int = 1) -> FakeTensor | None:
    """Support an axis of static size, or the whole of an axis of symbolic size."""
    if not fakes.are_supported(x, dtype=None) or not _are_axes(x, axis) or step < 1:
        return None
    if not isinstance(x.shape[axis], int):
        is_whole_axis = step == 1 and _is_one_of(start, None, 0) and _is_one_of(end, None, sys.maxsize)
        return fakes.view(x, x.shape, x.stride()) if is_whole_axis else None
    if not all(bound is None or isinstance(bound, int) for bound in (start, end)):
        return None
    shape, strides = list(x.shape), list(x.stride())
    indices = range(shape[axis])[start:end:step]
    offset = x.storage_offset() + indices.start * strides[axis]
    shape[axis] = len(indices)
    strides[axis] *= step
    return fakes.view(x, shape, strides, offset)


def _is_one_of(value: Any, *values: int | None) -> bool:
    return not isinstance(value, torch.SymInt) and value in values


def _view(fakes: Fakes, x: Any, size: Sequence[Any]) -> FakeTensor | None:
    """Support a contiguous tensor with provably as many elements, and any other tensor whose last axis is split."""
    if not fakes.are_supported(x, dtype=None):
        return None
    if not fakes.is_contiguous(x):
        is_same_shape = len(size) == x.dim() and all(map(is_same, size, x.shape)) and not any(map(is_one, size))
        return fakes.view(x, x.shape, x.stride()) if is_same_shape else _split_last_axis(fakes, x, size)
    shape, elements = list(size), x.numel()
    inferred = [i for i, n in enumerate(shape) if isinstance(n, int) and n < 0]
    others = math.prod(n for i, n in enumerate(shape) if i not in inferred)
    if len(inferred) > 1 or any(shape[i] != -1 for i in inferred) or (isinstance(others, int) and others == 0):
        return None
    for i in inferred:
        shape[i] = elements // others
    if not is_same(math.prod(shape), elements):
        return None
    return fakes.view(x, shape, contiguous_strides(shape))


def _split_last_axis(fakes: Fakes, x: FakeTensor, size: Sequence[Any]) -> FakeTensor | None:
    """Split the last axis, of static size, in two, as attention does: [..., h * d] -> [..., h, d]."""
    batch, last = list(x.shape[:-1]), size[len(x.shape) - 1 :]
    if len(size) != x.dim() + 1 or not isinstance(x.shape[-1], int) or not all(isinstance(n, int) for n in last):
        return None
    if any(not is_same(n, m) for n, m in zip(size, batch, strict=False)):
        return None
    if any(isinstance(n, int) and n < 2 for n in batch) or any(map(is_one, last)):
        return None  # PyTorch may choose any stride for such an axis
    heads, width = last
    if heads == -1:
        heads = x.shape[-1] // width if width > 0 else 0
    if width == -1:
        width = x.shape[-1] // heads if heads > 0 else 0
    if heads < 1 or width < 1 or heads * width != x.shape[-1]:
        return None
    stride = x.stride()[-1]
    return fakes.view(x, [*batch, heads, width], [*x.stride()[:-1], width * stride, stride])


META_FUNCTIONS: Mapping[Any, MetaFunction] = {
    **{getattr(_ATEN, name).default: _unary for name in (
        "cos", "exp", "log", "relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "tanh",
    )},
    **{getattr(_ATEN, name).default: _unary_real for name in ("abs", "neg")},
    **{getattr(_ATEN, name).Tensor: _binary for name in ("add", "mul", "sub")},
    **{getattr(_ATEN, name).default: _binary for name in ("maximum", "minimum")},
    **{getattr(_ATEN, name).Tensor: _logical for name in ("bitwise_and", "bitwise_or")},
    **{op: _compare for name in ("eq", "ge", "gt", "le", "lt", "ne") for op in (
        getattr(_ATEN, name).Tensor, getattr(_ATEN, name).Scalar,
    )},
    LOG_SOFTMAX.default: _log_softmax,
    NATIVE_BATCH_NORM.default: _batch_norm_of(NATIVE_BATCH_NORM.default, _batch_norm),
    NATIVE_BATCH_NORM.no_stats: _batch_norm_of(NATIVE_BATCH_NORM.no_stats),
    NATIVE_BATCH_NORM_FUNCTIONAL.default: _batch_norm_of(NATIVE_BATCH_NORM_FUNCTIONAL.default, _functional_batch_norm),
    NATIVE_BATCH_NORM_NO_TRAINING.default: _batch_norm_of(NATIVE_BATCH_NORM_NO_TRAINING.default),
    TO_COPY.default: _cast,
    UNSAFE_VIEW.default: _view,
    _ATEN.addmm.default: _addmm,
    _ATEN.arange.default: _arange,
    _ATEN.cat.default: _cat,
    _ATEN.clone.default: _clone,
    _ATEN.cumsum.default: _cumsum,
    _ATEN.div.Tensor: _divide,
    _ATEN.expand.default: _expand,
    _ATEN.gelu.default: _gelu,
    _ATEN.index.Tensor: _index,
    _ATEN.mean.dim: _mean,
    _ATEN.native_dropout.default: _dropout,
    _ATEN.new_empty.default: _new_empty,
    _ATEN.nll_loss_forward.default: _nll_loss,
    _ATEN.permute.default: _permute,
    _ATEN.pow.Tensor_Scalar: _pow,
    _ATEN.roll.default: _roll,
    _ATEN.slice.Tensor: _slice,
    _ATEN.transpose.int: _transpose,
    _ATEN.unsqueeze.default: _unsqueeze,
    _ATEN.view.default: _view,
    _ATEN.where.self: _where,
    torch.ops.prim.device.default: _device,
}  # fmt: skip
