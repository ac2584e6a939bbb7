"""Matmuls as C++."""

from __future__ import annotations

import math

from onnxtrain.graph.values import is_float
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.interfaces.cpp import CPP, Array, Source, UnsupportedError, loops, shape_of
from onnxtrain.ops.matmul.gemm import GEMM
from onnxtrain.ops.matmul.matmul import MATMUL

_MAX_INNER_DIM = 1024  # PyTorch multiplies in blocks; a sequential sum is as exact up to about this length


@CPP.implements(GEMM)
def _gemm(source: Source, n: NodeView, inputs: list[Array]) -> list[Array]:
    a, b = (
        x.with_dims(x.shape[::-1], x.strides[::-1]) if transposed else x
        for x, transposed in zip(inputs, (n.transA, n.transB), strict=False)
    )
    result = source.new(a.dtype, (a.shape[0], b.shape[1]), n.y)
    _multiply(source, a, b, result)
    if len(inputs) > 2 or n.alpha != 1:
        addends = [array.broadcast(result.shape) for array in inputs[2:]]
        update = f"{{0}} = {{0}} * {n.alpha!r}" + (f" + {{1}} * {n.beta!r}" if addends else "") + ";"
        source.lines(loops([result, *addends], lambda e: update.format(*e)))
    return [result]


@CPP.implements(MATMUL)
def _matmul(source: Source, n: NodeView, inputs: list[Array]) -> list[Array]:
    a, b = inputs
    if not is_float(a.dtype) or len(a.shape) < 2 or len(b.shape) < 2:
        raise UnsupportedError("a matmul of vectors or of integers")
    result = source.new(a.dtype, shape_of(n.y), n.y)
    _multiply(source, a, b, result)
    return [result]


def _multiply(source: Source, a: Array, b: Array, result: Array) -> None:
    """Write a @ b into `result`; each has at least two dimensions."""
    if b.shape[-1] > 1 and b.strides[-1] != 1:
        b = _with_contiguous_rows(source, b)
    (m, k), n = a.shape[-2:], b.shape[-1]
    if k > _MAX_INNER_DIM:
        raise UnsupportedError(f"a matmul with an inner dimension of {k}, more than {_MAX_INNER_DIM}")
    sizes = f"{a.c_type}, {m}, {n}, {k}, {a.strides[-2]}, {a.strides[-1]}, {b.strides[-2]}, {result.strides[-2]}"
    source.work(math.prod(result.shape) * k)
    batch = result.shape[:-2]
    matrices = [
        result.with_dims(batch, result.strides[:-2]),
        *(x.with_dims(x.shape[:-2], x.strides[:-2]).broadcast(batch) for x in (a, b)),
    ]
    source.lines(loops(matrices, lambda e: f"gemm<{sizes}>(&{e[1]}, &{e[2]}, &{e[0]});", independent=False))


def _with_contiguous_rows(source: Source, b: Array) -> Array:
    """Return a contiguous copy."""
    copy = source.new(b.dtype, b.shape)
    if b.strides[-2] != 1:
        source.lines(loops([copy, b], lambda e: f"{e[0]} = {e[1]};"))
        return copy
    sizes = f"{b.c_type}, {b.shape[-2]}, {b.shape[-1]}, {b.strides[-1]}"
    matrices = [x.with_dims(x.shape[:-2], x.strides[:-2]) for x in (copy, b)]
    source.lines(loops(matrices, lambda e: f"transpose<{sizes}>(&{e[1]}, &{e[0]});", independent=False))
    return copy
