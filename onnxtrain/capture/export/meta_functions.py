"""Results of frequent operators on fake tensors, without PyTorch's reference functions.

The export runs every operator on fake tensors to learn the type of its result. PyTorch finds it by functions that
compose the operator of others, each of which asks for the order of the elements, broadcasts, and promotes types: of
dropout it takes 5 ms, of a copy 1.3, and a T5 of six layers has 800 such calls. Where all operands are tensors of one
type whose elements lie in their usual order, so does the result; in another order, where their strides' expressions say
which; and a view has other sizes and strides.

A rule gives None for everything else, which PyTorch then finds, or refuses: operands of other kinds, on several devices
or with known elements, sizes that agree under a condition only, axes that there are none of.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from onnxtrain.capture.export.fake_tensors import FLOATING, NUMBERS, Fakes, broadcast_shape, is_one, is_same
from onnxtrain.torch_compat.aten_operators import (
    LOG_SOFTMAX,
    NATIVE_BATCH_NORM,
    NATIVE_BATCH_NORM_FUNCTIONAL,
    TO_COPY,
    UNSAFE_VIEW,
)
from onnxtrain.torch_compat.fake_tensors import FakeTensor, FakeTensorMode, contiguous_strides, has_symbolic_sizes
from onnxtrain.torch_compat.patch_points import FAKE_DISPATCH

_ATEN = torch.ops.aten

# Of Fakes and the operator's arguments.
Rule: TypeAlias = "Callable[..., FakeTensor | tuple[FakeTensor, ...] | torch.device | None]"


@contextmanager
def fake_results() -> Iterator[None]:
    """Holds the rules, for this thread. The capture lock must be held."""
    owner, dispatch = threading.get_ident(), FAKE_DISPATCH.original

    def ruled(
        self: FakeTensorMode,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        rule = RULES.get(func)
        if rule is not None and threading.get_ident() == owner:
            result = rule(Fakes(self), *args, **(kwargs or {}))
            if result is not None:
                return result
        return dispatch(self, func, types, args, kwargs or {})

    with FAKE_DISPATCH.wrapped(lambda _: ruled):
        yield


def _unary(fakes: Fakes, x: Any, kind: Any = FLOATING, dtype: torch.dtype | None = None) -> FakeTensor | None:
    """Element by element."""
    return fakes.elementwise([x], x.shape, dtype or x.dtype) if fakes.are_plain(x, dtype=kind) else None


def _in_order(fakes: Fakes, x: Any, kind: Any = FLOATING, dtype: torch.dtype | None = None) -> FakeTensor | None:
    """A result like an operand whose elements lie in order."""
    return fakes.like(x, dtype=dtype) if fakes.are_plain(x, dtype=kind) and fakes.is_in_order(x) else None


def _of_numbers(fakes: Fakes, x: Any) -> FakeTensor | None:
    return _unary(fakes, x, NUMBERS)


def _gelu(fakes: Fakes, x: Any, approximate: str = "none") -> FakeTensor | None:
    return _in_order(fakes, x)


def _power(fakes: Fakes, x: Any, exponent: Any) -> FakeTensor | None:
    return _unary(fakes, x) if type(exponent) in (int, float) else None


def _binary(fakes: Fakes, x: Any, y: Any, alpha: Any = 1) -> FakeTensor | None:
    """Of numbers of one type, with which a floating scalar or factor keeps it."""
    scalars = [value for value in (y, alpha) if not isinstance(value, torch.Tensor)]
    if any(type(value) not in (int, float) for value in scalars):
        return None
    if float in map(type, scalars) and not fakes.are_plain(x):
        return None
    return _broadcast(fakes, x, y, kind=NUMBERS) if isinstance(y, torch.Tensor) else _of_numbers(fakes, x)


def _quotient(fakes: Fakes, x: Any, y: Any) -> FakeTensor | None:
    return _binary(fakes, x, y) if fakes.are_plain(x) else None


def _comparison(fakes: Fakes, x: Any, y: Any) -> FakeTensor | None:
    if isinstance(y, torch.Tensor):
        return _broadcast(fakes, x, y, kind=NUMBERS, dtype=torch.bool)
    return _unary(fakes, x, NUMBERS, torch.bool) if type(y) in (int, float) else None


def _both(fakes: Fakes, x: Any, y: Any) -> FakeTensor | None:
    return _broadcast(fakes, x, y, kind=torch.bool)


def _where(fakes: Fakes, condition: Any, x: Any, y: Any) -> FakeTensor | None:
    return _broadcast(fakes, x, y, condition, kind=None) if fakes.are_plain(condition, dtype=torch.bool) else None


def _broadcast(
    fakes: Fakes, x: Any, y: Any, *others: FakeTensor, kind: Any = FLOATING, dtype: torch.dtype | None = None
) -> FakeTensor | None:
    """Of two tensors of this kind and of one type; `others` only share the shape."""
    if not fakes.are_plain(x, y, dtype=kind) or x.dtype != y.dtype:
        return None
    if any(t.fake_device != x.fake_device for t in others):
        return None
    shape = broadcast_shape([t.shape for t in (x, y, *others)])
    return None if shape is None else fakes.elementwise([x, y], shape, dtype or x.dtype, others)


def _clone(fakes: Fakes, x: Any, *, memory_format: torch.memory_format | None = None) -> FakeTensor | None:
    if memory_format is torch.contiguous_format:
        return fakes.like(x) if fakes.are_plain(x, dtype=None) else None
    if memory_format not in (None, torch.preserve_format) or not fakes.are_plain(x, dtype=None):
        return None
    if any(map(is_one, x.shape)) or not has_symbolic_sizes(x):
        return _in_order(fakes, x, None)
    return fakes.elementwise([x], x.shape, x.dtype)  # of elements that lie close together the same order, else that


def _copied(fakes: Fakes, x: Any, y: Any, non_blocking: bool = False) -> FakeTensor | None:
    """Written over `x`, of which each element gets its own."""
    if not fakes.are_plain(x, y, dtype=None) or x.dim() != y.dim():
        return None
    return x if all(map(is_same, x.shape, y.shape)) else None


def _cast(
    fakes: Fakes, x: Any, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **kwargs: Any
) -> FakeTensor | None:
    stays = fakes.are_plain(x, dtype=None) and _is_here(x, device)
    return None if any(kwargs.values()) or not stays else _in_order(fakes, x, None, dtype)


def _is_here(x: FakeTensor, device: torch.device | None) -> bool:
    return device is None or device == x.fake_device


def _dropout(fakes: Fakes, x: Any, p: float, train: bool | None) -> tuple[FakeTensor, ...] | None:
    y = _in_order(fakes, x) if train and 0 < p < 1 else None
    return None if y is None else (y, fakes.like(x, dtype=torch.bool))


def _batch_norm(fakes: Fakes, x: Any, weight: Any, bias: Any, *rest: Any) -> tuple[FakeTensor, ...] | None:
    """Of a batch: y, mean and deviation. `rest`: running mean and variance, training, momentum, epsilon."""
    given = [t for t in (weight, bias, *rest[:-3]) if t is not None]
    if not rest[-3] or not fakes.are_plain(x, *given) or any(t.dtype != x.dtype for t in given) or x.dim() < 2:
        return None
    if x.dtype not in (torch.float32, torch.float64) or not fakes.is_in_order(x):
        return None
    if any(t.dim() != 1 or not is_same(t.shape[0], x.shape[1]) for t in given):
        return None
    return fakes.like(x), fakes.like(x, x.shape[1:2]), fakes.like(x, x.shape[1:2])


def _functional_batch_norm(fakes: Fakes, x: Any, *rest: Any) -> tuple[FakeTensor, ...] | None:
    """And the next running mean and variance."""
    found = _batch_norm(fakes, x, *rest)
    if found is None or rest[2] is None or rest[3] is None:
        return None
    return *found, fakes.like(rest[2]), fakes.like(rest[3])


def _mean(fakes: Fakes, x: Any, dims: Any, keepdim: bool = False, *, dtype: Any = None) -> FakeTensor | None:
    if not dims or dtype is not None or not fakes.are_plain(x) or not _are_axes(x, *dims) or not fakes.is_in_order(x):
        return None
    left_out = {d % x.dim() for d in dims}
    kept = [1 if d in left_out else size for d, size in enumerate(x.shape) if keepdim or d not in left_out]
    return fakes.like(x, kept) if len(left_out) == len(dims) else None


def _log_softmax(fakes: Fakes, x: Any, axis: int, half_to_float: bool) -> FakeTensor | None:
    return None if half_to_float or not _are_axes(x, axis) else _in_order(fakes, x)


def _cumsum(fakes: Fakes, x: Any, axis: int, *, dtype: torch.dtype | None = None) -> FakeTensor | None:
    kept = x.dtype.is_floating_point or x.dtype.is_complex
    return _in_order(fakes, x, None, dtype or (x.dtype if kept else torch.int64)) if _are_axes(x, axis) else None


def _nll_loss(
    fakes: Fakes, x: Any, labels: Any, weight: Any, reduction: int, ignored: Any
) -> tuple[FakeTensor, ...] | None:
    """Of rows: the loss, and the sum of the weights."""
    if not fakes.are_plain(x) or not fakes.are_plain(labels, dtype=torch.int64) or weight is not None:
        return None
    if x.dim() != 2 or labels.dim() != 1 or not is_same(x.shape[0], labels.shape[0]):
        return None
    if labels.fake_device != x.fake_device or reduction not in (1, 2):
        return None
    return fakes.like(x, []), fakes.like(x, [])


def _embedding(fakes: Fakes, weight: Any, indices: Any, *rest: Any) -> FakeTensor | None:
    if not fakes.are_plain(weight) or not fakes.are_plain(indices, dtype=torch.int64) or weight.dim() != 2:
        return None
    plain = fakes.is_in_order(weight) and weight.fake_device == indices.fake_device
    return fakes.like(weight, [*indices.shape, weight.shape[1]]) if plain else None


def _addmm(fakes: Fakes, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> FakeTensor | None:
    if not fakes.are_plain(bias, a, b) or len({bias.dtype, a.dtype, b.dtype}) > 1:
        return None
    if (bias.dim(), a.dim(), b.dim()) != (1, 2, 2) or not is_same(a.shape[1], b.shape[0]):
        return None
    return fakes.like(a, [a.shape[0], b.shape[1]]) if is_same(bias.shape[0], b.shape[1]) else None


def _joined(fakes: Fakes, tensors: Sequence[Any], axis: int = 0) -> FakeTensor | None:
    """Of tensors of one type whose other sizes agree; in order, unless the channels of images may lie last in all."""
    if not tensors:
        return None
    first = tensors[0]
    if not fakes.are_plain(*tensors, dtype=None) or not _are_axes(first, axis):
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
    """Whether memory formats of images are asked for, and channels may lie next to each other."""
    if x.dim() not in (4, 5):
        return False
    channels, step = x.shape[1], x.stride()[1]
    return not isinstance(step, int) or step == 1 or not isinstance(channels, int) or channels == 1


def _index(fakes: Fakes, x: Any, indices: Sequence[Any]) -> FakeTensor | None:
    """Of one tensor of numbers for each axis."""
    if not fakes.are_plain(x, dtype=None) or len(indices) != x.dim() or any(i is None for i in indices):
        return None
    if not fakes.are_plain(*indices, dtype=torch.int64) or any(i.fake_device != x.fake_device for i in indices):
        return None
    shape = broadcast_shape([i.shape for i in indices])
    return None if shape is None or not has_symbolic_sizes(x) else fakes.like(x, shape)


def _filled(fakes: Fakes, x: Any, *value: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> FakeTensor | None:
    return None if any(kwargs.values()) else _in_order(fakes, x, None, dtype)


def _masked(fakes: Fakes, x: Any, mask: Any, value: Any) -> FakeTensor | None:
    """Of a number that the type holds."""
    holds = (float, int) if fakes.are_plain(x) else (int,)
    if type(value) not in holds or not fakes.are_plain(x, dtype=NUMBERS) or not fakes.are_plain(mask, dtype=torch.bool):
        return None
    if x.fake_device != mask.fake_device or not fakes.is_in_order(x) or not fakes.is_in_order(mask):
        return None
    shape = broadcast_shape([x.shape, mask.shape])
    kept = shape is not None and len(shape) == x.dim() and all(map(is_same, shape, x.shape))
    return fakes.like(x) if kept else None


def _scalar(
    fakes: Fakes, value: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, **kwargs: Any
) -> FakeTensor | None:
    if type(value) not in (int, float, bool) or dtype is None or device is None or any(kwargs.values()):
        return None
    return fakes.new([], dtype, device) if layout is torch.strided and device.type == "cpu" else None


def _arange(fakes: Fakes, end: Any, *, dtype: Any = None, device: Any = None, **kwargs: Any) -> FakeTensor | None:
    """Whole numbers up to one that is known, or to a size: of what may be negative PyTorch asks whether it is."""
    if isinstance(end, torch.SymInt):
        known = end.node.shape_env.var_to_range.get(end.node.expr)
        counts = known is not None and known.lower >= 0
    else:
        counts = type(end) is int and end >= 0
    if not counts or device is None or torch.device(device).type == "meta" or any(kwargs.values()):
        return None
    return fakes.new([end], dtype or torch.int64, torch.device(device))


def _device(fakes: Fakes, x: Any) -> torch.device | None:
    return x.fake_device if type(x) is FakeTensor and x.fake_mode is fakes.mode else None


def _are_axes(x: FakeTensor, *axes: int) -> bool:
    return all(-x.dim() <= axis < x.dim() for axis in axes)


def _new_empty(fakes: Fakes, x: Any, size: Sequence[Any], **kwargs: Any) -> FakeTensor | None:
    plain = not any(kwargs.values()) and fakes.are_plain(x, dtype=None)
    return fakes.like(x, size) if plain and not any(isinstance(n, int) and n < 0 for n in size) else None


# Views


def _transpose(fakes: Fakes, x: Any, first: int, second: int) -> FakeTensor | None:
    if not fakes.are_plain(x, dtype=None) or not _are_axes(x, first, second):
        return None
    order = list(range(x.dim()))
    order[first], order[second] = order[second], order[first]
    return _permute(fakes, x, order)


def _permute(fakes: Fakes, x: Any, order: Sequence[int]) -> FakeTensor | None:
    if not fakes.are_plain(x, dtype=None) or not _are_axes(x, *order):
        return None
    if sorted(d % x.dim() for d in order) != list(range(x.dim())):
        return None
    shape, strides = x.shape, x.stride()
    return fakes.view(x, [shape[d] for d in order], [strides[d] for d in order])


def _unsqueeze(fakes: Fakes, x: Any, axis: int) -> FakeTensor | None:
    if not fakes.are_plain(x, dtype=None) or not -x.dim() - 1 <= axis <= x.dim():
        return None
    axis %= x.dim() + 1
    shape, strides = list(x.shape), list(x.stride())
    strides.insert(axis, shape[axis] * strides[axis] if axis < len(shape) else 1)
    return fakes.view(x, [*shape[:axis], 1, *shape[axis:]], strides)


def _expand(fakes: Fakes, x: Any, size: Sequence[Any], *, implicit: bool = False) -> FakeTensor | None:
    new = len(size) - x.dim() if isinstance(x, torch.Tensor) else -1
    if new < 0 or not fakes.are_plain(x, dtype=None):
        return None
    shape = list(size)
    for axis, own in enumerate(x.shape, new):
        if isinstance(shape[axis], int) and shape[axis] == -1:
            shape[axis] = own
        elif not is_one(own) and not is_same(own, shape[axis]):
            return None
    return None if any(isinstance(n, int) and n < 0 for n in shape) else fakes.expanded(x, shape)


def _slice(fakes: Fakes, x: Any, axis: int = 0, start: Any = None, end: Any = None, step: int = 1) -> FakeTensor | None:
    """Of an axis of known size, or all of one."""
    if not fakes.are_plain(x, dtype=None) or not _are_axes(x, axis) or step < 1:
        return None
    if not isinstance(x.shape[axis], int):
        whole = step == 1 and _is_number(start, None, 0) and _is_number(end, None, sys.maxsize)
        return fakes.view(x, x.shape, x.stride()) if whole else None
    if not all(bound is None or isinstance(bound, int) for bound in (start, end)):
        return None
    shape, strides = list(x.shape), list(x.stride())
    chosen = range(shape[axis])[start:end:step]
    offset = x.storage_offset() + chosen.start * strides[axis]
    shape[axis] = len(chosen)
    strides[axis] *= step
    return fakes.view(x, shape, strides, offset)


def _is_number(value: Any, *numbers: int | None) -> bool:
    return not isinstance(value, torch.SymInt) and value in numbers


def _view(fakes: Fakes, x: Any, size: Sequence[Any]) -> FakeTensor | None:
    """Of elements in order, to as many by the sizes' expressions; or with the last axis divided."""
    if not fakes.are_plain(x, dtype=None):
        return None
    if not fakes.is_contiguous(x):
        kept = len(size) == x.dim() and all(map(is_same, size, x.shape)) and not any(map(is_one, size))
        return fakes.view(x, x.shape, x.stride()) if kept else _with_divided_rows(fakes, x, size)
    shape, elements = list(size), x.numel()
    open_ = [i for i, n in enumerate(shape) if isinstance(n, int) and n < 0]
    known = math.prod(n for i, n in enumerate(shape) if i not in open_)
    if len(open_) > 1 or any(shape[i] != -1 for i in open_) or (isinstance(known, int) and known == 0):
        return None
    for i in open_:
        shape[i] = elements // known
    if not is_same(math.prod(shape), elements):
        return None
    return fakes.view(x, shape, contiguous_strides(shape))


def _with_divided_rows(fakes: Fakes, x: FakeTensor, size: Sequence[Any]) -> FakeTensor | None:
    """The last axis, of known size, as two: a head's numbers behind its number."""
    kept, last = list(x.shape[:-1]), size[len(x.shape) - 1 :]
    if len(size) != x.dim() + 1 or not isinstance(x.shape[-1], int) or not all(isinstance(n, int) for n in last):
        return None
    if any(not is_same(n, m) for n, m in zip(size, kept, strict=False)):
        return None
    if any(isinstance(n, int) and n < 2 for n in kept) or any(map(is_one, last)):
        return None  # the strides of such axes may be any
    heads, width = last
    if heads == -1:
        heads = x.shape[-1] // width if width > 0 else 0
    if width == -1:
        width = x.shape[-1] // heads if heads > 0 else 0
    if heads < 1 or width < 1 or heads * width != x.shape[-1]:
        return None
    step = x.stride()[-1]
    return fakes.view(x, [*kept, heads, width], [*x.stride()[:-1], width * step, step])


RULES: Mapping[Any, Rule] = {
    **{getattr(_ATEN, name).default: _unary for name in (
        "cos", "exp", "log", "relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "tanh",
    )},
    **{getattr(_ATEN, name).default: _of_numbers for name in ("abs", "neg")},
    **{getattr(_ATEN, name).Tensor: _binary for name in ("add", "mul", "sub")},
    **{getattr(_ATEN, name).default: _binary for name in ("maximum", "minimum")},
    **{getattr(_ATEN, name).Tensor: _both for name in ("bitwise_and", "bitwise_or")},
    **{getattr(_ATEN, name).default: _filled for name in ("full_like", "ones_like", "zeros_like")},
    **{op: _comparison for name in ("eq", "ge", "gt", "le", "lt", "ne") for op in (
        getattr(_ATEN, name).Tensor, getattr(_ATEN, name).Scalar,
    )},
    LOG_SOFTMAX.default: _log_softmax,
    NATIVE_BATCH_NORM.default: _batch_norm,
    NATIVE_BATCH_NORM_FUNCTIONAL.default: _functional_batch_norm,
    TO_COPY.default: _cast,
    UNSAFE_VIEW.default: _view,
    _ATEN.addmm.default: _addmm,
    _ATEN.arange.default: _arange,
    _ATEN.cat.default: _joined,
    _ATEN.clone.default: _clone,
    _ATEN.copy_.default: _copied,
    _ATEN.cumsum.default: _cumsum,
    _ATEN.div.Tensor: _quotient,
    _ATEN.embedding.default: _embedding,
    _ATEN.expand.default: _expand,
    _ATEN.gelu.default: _gelu,
    _ATEN.index.Tensor: _index,
    _ATEN.masked_fill.Scalar: _masked,
    _ATEN.mean.dim: _mean,
    _ATEN.native_dropout.default: _dropout,
    _ATEN.new_empty.default: _new_empty,
    _ATEN.nll_loss_forward.default: _nll_loss,
    _ATEN.permute.default: _permute,
    _ATEN.pow.Tensor_Scalar: _power,
    _ATEN.scalar_tensor.default: _scalar,
    _ATEN.slice.Tensor: _slice,
    _ATEN.transpose.int: _transpose,
    _ATEN.unsqueeze.default: _unsqueeze,
    _ATEN.view.default: _view,
    _ATEN.where.self: _where,
    torch.ops.prim.device.default: _device,
}  # fmt: skip
