"""Reductions as C++."""

from __future__ import annotations

import math
from collections.abc import Callable

from onnxtrain.graph.values import constant_of, is_float, normalize_axes
from onnxtrain.ops.definition import NodeView, OpDef
from onnxtrain.ops.interfaces.cpp import CPP, Array, Source, UnsupportedError, loops, shape_of, strides_of
from onnxtrain.ops.reduce.extremes import REDUCE_MAX, REDUCE_MIN
from onnxtrain.ops.reduce.sums import REDUCE_MEAN, REDUCE_SUM

_MAX_SUM_LENGTH = 128  # PyTorch sums long rows in a tree; a sequential sum is as exact up to about this length

Reduction = Callable[[Source, Array, Array, frozenset[int]], None]


def _reduces(op: OpDef) -> Callable[[Reduction], Reduction]:
    """Register an emitter that reduces an array over axes into another, whose reduced axes have size 1."""

    def register(reduction: Reduction) -> Reduction:
        @CPP.implements(op)
        def emit(source: Source, n: NodeView, inputs: list[Array]) -> list[Array]:
            array = inputs[0]
            if not is_float(array.dtype):
                raise UnsupportedError(f"{op.name} of integers")
            axes = _axes(n, len(array.shape))
            if not axes:
                return [array]
            keepdims = tuple(1 if axis in axes else size for axis, size in enumerate(array.shape))
            result = source.new(array.dtype, keepdims, n.y)
            reduction(source, array, result, axes)
            shape = shape_of(n.y)
            return [result.with_dims(shape, strides_of(shape))]

        return reduction

    return register


@_reduces(REDUCE_MAX)
def _max(source: Source, array: Array, result: Array, axes: frozenset[int]) -> None:
    _extremum(source, array, result, ">", "-INFINITY")


@_reduces(REDUCE_MIN)
def _min(source: Source, array: Array, result: Array, axes: frozenset[int]) -> None:
    _extremum(source, array, result, "<", "INFINITY")


def _extremum(source: Source, array: Array, result: Array, comparison: str, initial: str) -> None:
    """NaN wins, as in PyTorch."""
    source.lines(loops([result], lambda e: f"{e[0]} = {initial};"))
    update = f"if ({{1}} {comparison} {{0}} || {{1}} != {{1}}) {{0}} = {{1}};"
    source.lines(loops([result.broadcast(array.shape), array], lambda e: update.format(*e), independent=False))


@_reduces(REDUCE_MEAN)
def _mean(source: Source, array: Array, result: Array, axes: frozenset[int]) -> None:
    _sum(source, array, result, axes)
    count = math.prod(array.shape[axis] for axis in axes)
    source.lines(loops([result], lambda e: f"{e[0]} /= {count};"))


def _axes(n: NodeView, rank: int) -> frozenset[int]:
    axes = constant_of(n.axes)
    if n.axes is not None and axes is None:
        raise UnsupportedError("axes that are not constants")
    if axes is None or axes.size == 0:
        return frozenset() if n.noop_with_empty_axes else frozenset(range(rank))
    return frozenset(normalize_axes(axes.tolist(), rank))


@_reduces(REDUCE_SUM)
def _sum(source: Source, array: Array, result: Array, axes: frozenset[int]) -> None:
    """Contiguous elements are summed in blocks; other axes row by row, which vectorizes over the inner axes."""
    innermost = 0
    while innermost < len(array.shape) and len(array.shape) - 1 - innermost in axes:
        innermost += 1
    split = len(array.shape) - innermost
    inner = array.shape[split:]
    tail = array.with_dims(inner, array.strides[split:])
    if innermost and tail.is_contiguous and axes == frozenset(range(split, len(array.shape))):
        outer = array.with_dims(array.shape[:split], array.strides[:split])
        rows = result.with_dims(result.shape[:split], result.strides[:split])
        count = math.prod(inner)
        source.lines(loops([rows, outer], lambda e: f"{e[0]} = sum_of(&{e[1]}, {count});"))
        return
    if math.prod(array.shape[axis] for axis in axes) > _MAX_SUM_LENGTH:
        raise UnsupportedError(f"a sequential sum of more than {_MAX_SUM_LENGTH} elements")
    source.lines(loops([result], lambda e: f"{e[0]} = 0;"))
    source.lines(loops([result.broadcast(array.shape), array], lambda e: f"{e[0]} += {e[1]};", independent=False))
