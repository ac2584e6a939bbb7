"""Emit standard ops as C++: elementwise ops by their `cpp_expression`, others by an emitter registered for the op.

An emitter takes the source, the node and its inputs, and returns the node's outputs: new arrays, or views of inputs. It
raises `UnsupportedError` for a node that it cannot emit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import onnx_ir as ir

from onnxtrain.execute.cpp_program.arrays import Array, Shape, UnsupportedError, loops, strides_of
from onnxtrain.graph.values import ONNX, constant_of, is_float, normalize_axes, normalize_axis
from onnxtrain.ops import definition_of, lookup


class Source(Protocol):
    """The function that is being emitted, as emitters see it."""

    def lines(self, lines: Sequence[str]) -> None: ...

    def new(self, dtype: ir.DataType, shape: Shape, value: ir.Value | None = None) -> Array: ...

    def work(self, count: int) -> None: ...


# PyTorch sums long rows in a tree and matmuls in blocks; a sequential sum is as exact up to about these lengths.
_LONGEST_SUM = 128
_LONGEST_INNER_DIM = 1024

Emitter = Callable[[Source, ir.Node, list[Array]], list[Array]]
_EMITTERS: dict[tuple[str, str], Emitter] = {}


def emits(domain: str, *names: str) -> Callable[[Emitter], Emitter]:
    """Register an emitter for ops. Raises GraphError if an op has no definition."""

    def register(emitter: Emitter) -> Emitter:
        for name in names:
            definition = lookup(domain, name)
            _EMITTERS[definition.domain, definition.name] = emitter
        return emitter

    return register


def emitter_of(node: ir.Node) -> Emitter:
    """The emitter of a node.

    Raises:
        UnsupportedError: its op has none.
    """
    if definition_of(node).cpp_expression:
        return _elementwise
    emitter = _EMITTERS.get((node.domain, node.op_type))
    if emitter is None:
        raise UnsupportedError(f"{node.op_type} has no emitter")
    return emitter


def _output(source: Source, node: ir.Node, dtype: ir.DataType, shape: Shape) -> Array:
    return source.new(dtype, shape, node.outputs[0])


def _attribute(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _elementwise(source: Source, node: ir.Node, inputs: list[Array]) -> list[Array]:
    expression = definition_of(node).cpp_expression
    if "/" in expression and not is_float(inputs[0].dtype):
        raise UnsupportedError(f"{node.op_type} of integers")  # division by 0 ends the process
    if len(inputs) != 1 + ("{1}" in expression) + ("{2}" in expression):
        raise UnsupportedError(f"{node.op_type} of {len(inputs)} inputs")
    return [_loop(source, node, inputs, expression)]


def _loop(source: Source, node: ir.Node, inputs: Sequence[Array], expression: str) -> Array:
    value = node.outputs[0]
    assert value.dtype is not None
    shape = _shape(value)
    result = _output(source, node, value.dtype, shape)
    operands = [array.broadcast(shape) for array in inputs]
    source.lines(loops([result, *operands], lambda e: f"{e[0]} = {expression.format(*e[1:])};"))
    return result


def _shape(value: ir.Value) -> Shape:
    assert value.shape is not None
    return tuple(int(str(size)) for size in value.shape)


@emits(ONNX, "Pow")
def _pow(source: Source, node: ir.Node, inputs: list[Array]) -> list[Array]:
    exponent = constant_of(node.inputs[1])
    if exponent is None or exponent.size != 1 or not is_float(inputs[0].dtype):
        raise UnsupportedError("a power that is not a constant")
    expressions = {2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 0.5: "std::sqrt({0})", -1.0: "1 / {0}"}
    expression = expressions.get(float(exponent.item()))
    if expression is None:
        raise UnsupportedError(f"a power of {exponent.item()}")
    return [_loop(source, node, inputs[:1], expression)]


@emits(ONNX, "Cast")
def _cast(source: Source, node: ir.Node, inputs: list[Array]) -> list[Array]:
    target = node.outputs[0].dtype
    if target == inputs[0].dtype:
        return inputs
    if target == ir.DataType.BOOL:
        return [_loop(source, node, inputs, "{0} != 0")]
    assert target is not None
    if is_float(inputs[0].dtype) and not is_float(target):
        raise UnsupportedError("a cast from floating point to integer")
    return [_loop(source, node, inputs, "{0}")]


# Views


@emits(ONNX, "Identity")
def _identity(source: Source, node: ir.Node, inputs: list[Array]) -> list[Array]:
    return inputs[:1]


@emits(ONNX, "Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _reshape(source: Source, node: ir.Node, inputs: list[Array]) -> list[Array]:
    shape = _shape(node.outputs[0])
    array = inputs[0]
    if not array.is_contiguous:
        copy = source.new(array.dtype, array.shape)
        source.lines(loops([copy, array], lambda e: f"{e[0]} = {e[1]};"))
        array = copy
    return [array.with_dims(shape, strides_of(shape))]


@emits(ONNX, "Transpose")
def _transpose(source: Source, node: ir.Node, inputs: list[Array]) -> list[Array]:
    (array,) = inputs
    attribute = node.attributes.get("perm")
    order = list(reversed(range(len(array.shape)))) if attribute is None else list(attribute.as_ints())
    return [array.with_dims([array.shape[i] for i in order], [array.strides[i] for i in order])]


@emits(ONNX, "Expand")
def _expand(source: Source, node: ir.Node, inputs: list[Array]) -> list[Array]:
    return [inputs[0].broadcast(_shape(node.outputs[0]))]


@emits(ONNX, "Concat")
def _concat(source: Source, node: ir.Node, inputs: list[Array]) -> list[Array]:
    shape = _shape(node.outputs[0])
    result = _output(source, node, inputs[0].dtype, shape)
    axis = normalize_axis(_attribute(node, "axis", 0), len(shape))
    start = 0
    for array in inputs:
        target = Array(f"({result.name} + {start * result.strides[axis]})", result.dtype, array.shape, result.strides)
        source.lines(loops([target, array], lambda e: f"{e[0]} = {e[1]};"))
        start += array.shape[axis]
    return [result]


# Reductions


Reduction = Callable[[Source, Array, Array, frozenset[int]], None]


def _reduces(name: str) -> Callable[[Reduction], Reduction]:
    """Register an emitter that reduces an array over axes into another, whose reduced axes have size 1."""

    def register(reduction: Reduction) -> Reduction:
        @emits(ONNX, name)
        def emit(source: Source, node: ir.Node, inputs: list[Array]) -> list[Array]:
            array = inputs[0]
            if not is_float(array.dtype):
                raise UnsupportedError(f"{name} of integers")
            axes = _axes(node, len(array.shape))
            if not axes:
                return [array]
            keepdims = tuple(1 if axis in axes else size for axis, size in enumerate(array.shape))
            result = _output(source, node, array.dtype, keepdims)
            reduction(source, array, result, axes)
            shape = _shape(node.outputs[0])
            return [result.with_dims(shape, strides_of(shape))]

        return reduction

    return register


@_reduces("ReduceMax")
def _max(source: Source, array: Array, result: Array, axes: frozenset[int]) -> None:
    _extremum(source, array, result, ">", "-INFINITY")


@_reduces("ReduceMin")
def _min(source: Source, array: Array, result: Array, axes: frozenset[int]) -> None:
    _extremum(source, array, result, "<", "INFINITY")


def _extremum(source: Source, array: Array, result: Array, comparison: str, initial: str) -> None:
    """NaN wins, as in PyTorch."""
    source.lines(loops([result], lambda e: f"{e[0]} = {initial};"))
    update = f"if ({{1}} {comparison} {{0}} || {{1}} != {{1}}) {{0}} = {{1}};"
    source.lines(loops([result.broadcast(array.shape), array], lambda e: update.format(*e), independent=False))


@_reduces("ReduceMean")
def _mean(source: Source, array: Array, result: Array, axes: frozenset[int]) -> None:
    _sum(source, array, result, axes)
    count = math.prod(array.shape[axis] for axis in axes)
    source.lines(loops([result], lambda e: f"{e[0]} /= {count};"))


def _axes(node: ir.Node, rank: int) -> frozenset[int]:
    axes_input = node.inputs[1] if len(node.inputs) > 1 else None
    axes = constant_of(axes_input)
    if axes_input is not None and axes is None:
        raise UnsupportedError("axes that are not constants")
    if axes is None or axes.size == 0:
        return frozenset() if _attribute(node, "noop_with_empty_axes", 0) else frozenset(range(rank))
    return frozenset(normalize_axes(axes.tolist(), rank))


@_reduces("ReduceSum")
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
    if math.prod(array.shape[axis] for axis in axes) > _LONGEST_SUM:
        raise UnsupportedError(f"a sequential sum of more than {_LONGEST_SUM} elements")
    source.lines(loops([result], lambda e: f"{e[0]} = 0;"))
    source.lines(loops([result.broadcast(array.shape), array], lambda e: f"{e[0]} += {e[1]};", independent=False))


# Matmuls


@emits(ONNX, "Gemm")
def _gemm(source: Source, node: ir.Node, inputs: list[Array]) -> list[Array]:
    a, b = (
        x.with_dims(x.shape[::-1], x.strides[::-1]) if _attribute(node, flag, 0) else x
        for x, flag in zip(inputs, ("transA", "transB"), strict=False)
    )
    alpha, beta = (node.attributes[name].as_float() if name in node.attributes else 1.0 for name in ("alpha", "beta"))
    result = _output(source, node, a.dtype, (a.shape[0], b.shape[1]))
    _multiply(source, a, b, result)
    if len(inputs) > 2 or alpha != 1:
        addends = [array.broadcast(result.shape) for array in inputs[2:]]
        update = f"{{0}} = {{0}} * {alpha!r}" + (f" + {{1}} * {beta!r}" if addends else "") + ";"
        source.lines(loops([result, *addends], lambda e: update.format(*e)))
    return [result]


@emits(ONNX, "MatMul")
def _matmul(source: Source, node: ir.Node, inputs: list[Array]) -> list[Array]:
    a, b = inputs
    if not is_float(a.dtype) or len(a.shape) < 2 or len(b.shape) < 2:
        raise UnsupportedError("a matmul of vectors or of integers")
    shape = _shape(node.outputs[0])
    result = _output(source, node, a.dtype, shape)
    _multiply(source, a, b, result)
    return [result]


def _multiply(source: Source, a: Array, b: Array, result: Array) -> None:
    """Write a @ b into `result`; each has at least two dimensions."""
    if b.shape[-1] > 1 and b.strides[-1] != 1:
        b = _with_contiguous_rows(source, b)
    (m, k), n = a.shape[-2:], b.shape[-1]
    if k > _LONGEST_INNER_DIM:
        raise UnsupportedError(f"a matmul with an inner dimension of {k}, more than {_LONGEST_INNER_DIM}")
    sizes = f"{a.c_type}, {m}, {n}, {k}, {a.strides[-2]}, {a.strides[-1]}, {b.strides[-2]}, {result.strides[-2]}"
    source.work(math.prod(result.shape) * k)
    batch = result.shape[:-2]
    matrices = [
        result.with_dims(batch, result.strides[:-2]),
        *(x.with_dims(x.shape[:-2], x.strides[:-2]).broadcast(batch) for x in (a, b)),
    ]
    source.lines(loops(matrices, lambda e: f"gemm<{sizes}>(&{e[1]}, &{e[2]}, &{e[0]});", independent=False))


def _with_contiguous_rows(source: Source, b: Array) -> Array:
    """A contiguous copy."""
    copy = source.new(b.dtype, b.shape)
    if b.strides[-2] != 1:
        source.lines(loops([copy, b], lambda e: f"{e[0]} = {e[1]};"))
        return copy
    sizes = f"{b.c_type}, {b.shape[-2]}, {b.shape[-1]}, {b.strides[-1]}"
    matrices = [x.with_dims(x.shape[:-2], x.strides[:-2]) for x in (copy, b)]
    source.lines(loops(matrices, lambda e: f"transpose<{sizes}>(&{e[1]}, &{e[0]});", independent=False))
    return copy
