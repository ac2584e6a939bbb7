"""Concat and Split."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import TensorType, dtype_of, normalize_axis, rank_of
from onnxtrain.ops.body_parts import cast, int64_vector, reshaped
from onnxtrain.ops.definition import Call, NodeView
from onnxtrain.ops.interfaces.cpp import CPP, Array, Source, loops, shape_of
from onnxtrain.ops.interfaces.element_formulas import ELEMENT_FORMULAS, Formula, FormulaOf, affine
from onnxtrain.ops.reshape.dims import unsqueezed
from onnxtrain.ops.reshape.movement import axis_names, axis_of, define_movement, format_axis_map
from onnxtrain.ops.symbolic_ints import required_ints

# Concat(xs..., axis)


def concatenated(op: Builder, xs: Sequence[ir.Value], axis: int) -> ir.Value:
    """Concatenate along `axis`; return a single tensor itself."""
    return xs[0] if len(xs) == 1 else op.Concat(*xs, axis=normalize_axis(axis, rank_of(xs[0])))


def _concatenated_type(n: NodeView) -> Sequence[TensorType]:
    axis = axis_of(n, n.xs[0])
    shapes = [sizes.dims_of(x) for x in n.xs]
    if any(len(s) != len(shapes[0]) or dtype_of(x) != dtype_of(n.xs[0]) for s, x in zip(shapes, n.xs, strict=True)):
        raise GraphError(
            "Concat: the inputs differ in rank or element type",
            expected=f"{dtype_of(n.xs[0]).name} of rank {len(shapes[0])}, as the first input",
            got=", ".join(f"{dtype_of(x).name}{list(shape)}" for x, shape in zip(n.xs, shapes, strict=True)),
        )
    # The other axes are equal: a size that is static for one input is so for all.
    columns = zip(*shapes, strict=True)
    result: list[Size] = [next((s for s in column if isinstance(s, int)), column[0]) for column in columns]
    result[axis] = sizes.add(*(s[axis] for s in shapes))
    return (TensorType(dtype_of(n.xs[0]), tuple(result)),)


def _concat_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value]:
    axis = axis_of(n, n.xs[0])
    return split(op, dy, [sizes.dims_of(x)[axis] for x in n.xs], axis)


def _concat_axes(n: NodeView) -> str:
    axis = axis_of(n, n.xs[0])
    names = axis_names("a", rank_of(n.xs[0]))
    inputs = [[f"x{i}" if k == axis else name for k, name in enumerate(names)] for i in range(len(n.xs))]
    return format_axis_map(inputs, names)


def _joined(op: Builder, xs: Sequence[ir.Value], axis: int) -> ir.Value:
    """Concatenate as PyTorch does: the result is contiguous and a new tensor, also of a single input."""
    if len(xs) == 1:
        copy: ir.Value = op.own.Clone(xs[0], memory_format="contiguous_format")
        return copy
    return concatenated(op, xs, axis)


def _capture_cat(op: Builder, xs: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    """Capture cat: PyTorch promotes to the widest type, and ignores vectors of size 0 among tensors of higher rank."""
    dtype, shape = op.out[0]
    kept = [x for x in xs if len(shape) == 1 or sizes.dims_of(x) != (0,)]
    return _joined(op, [cast(op, x, dtype) for x in kept or xs[:1]], dim)


def _capture_stack(op: Builder, xs: Sequence[ir.Value], dim: int = 0) -> ir.Value:
    dtype, shape = op.out[0]
    axis = normalize_axis(dim, len(shape))
    return _joined(op, [unsqueezed(op, cast(op, x, dtype), axis) for x in xs], axis)


def _capture_stack_of_rank(min_rank: int, axis: int) -> Any:
    """Capture `hstack`, `vstack` or `dstack`: expand all to `min_rank`, then concatenate along `axis`."""

    def capture(op: Builder, xs: Sequence[ir.Value]) -> ir.Value:
        rank = len(op.out[0].shape)
        expanded = [cast(op, _with_min_rank(op, x, min_rank), op.out[0].dtype) for x in xs]
        return _joined(op, expanded, 0 if rank == 1 else axis)

    return capture


def _with_min_rank(op: Builder, x: ir.Value, rank: int) -> ir.Value:
    """Reshape as torch.atleast_1d, 2d or 3d does."""
    shape = sizes.dims_of(x)
    if len(shape) >= rank:
        return x
    if not shape:
        return reshaped(op, x, (1,) * rank)
    with_ones = {(1, 2): (1, *shape), (1, 3): (1, *shape, 1), (2, 3): (*shape, 1)}[len(shape), rank]
    return reshaped(op, x, with_ones)


def _capture_column_stack(op: Builder, xs: Sequence[ir.Value]) -> ir.Value:
    columns = [reshaped(op, x, (sizes.multiply(1, *sizes.dims_of(x)), 1)) if rank_of(x) < 2 else x for x in xs]
    return _joined(op, [cast(op, c, op.out[0].dtype) for c in columns], 1)


_MAX_PREFIX = 64  # elements of a part whose formulas are compared one by one

CONCAT = define_movement(
    "Concat",
    ("xs...",),
    _concatenated_type,
    lambda n, xs: Call(torch.cat, xs, axis_of(n, n.xs[0])),
    _concat_gradient,
    attributes={"axis": 0},
    from_torch={
        "aten.cat.default": _capture_cat,
        "aten.concat.default": _capture_cat,
        "aten.concatenate.default": _capture_cat,
        "aten.stack.default": _capture_stack,
        "aten.hstack.default": _capture_stack_of_rank(1, 1),
        "aten.vstack.default": _capture_stack_of_rank(2, 0),
        "aten.row_stack.default": _capture_stack_of_rank(2, 0),
        "aten.dstack.default": _capture_stack_of_rank(3, 2),
        "aten.column_stack.default": _capture_column_stack,
    },
    axes=_concat_axes,
    host_eval=lambda n, *parts: tuple(itertools.chain.from_iterable(parts)),
    moved_inputs=frozenset({"xs"}),
)


@CPP.implements(CONCAT)
def _concat_in_cpp(source: Source, n: NodeView, inputs: list[Array]) -> list[Array]:
    result = source.new(inputs[0].dtype, shape_of(n.y), n.y)
    axis, start = axis_of(n, n.y), 0
    for array in inputs:
        target = Array(f"({result.name} + {start * result.strides[axis]})", result.dtype, array.shape, result.strides)
        source.lines(loops([target, array], lambda e: f"{e[0]} = {e[1]};"))
        start += array.shape[axis]
    return [result]


@ELEMENT_FORMULAS.implements(CONCAT)
def _concat_formula(n: NodeView, formula_of: FormulaOf) -> Formula | None:
    """Return one formula for all parts: that of the last, if the parts before it are static and follow it too."""
    formulas = [affine(formula_of, x) for x in n.xs]
    axis = axis_of(n, n.y)
    lengths = [sizes.dims_of(x)[axis] for x in n.xs]
    last = formulas[-1]
    if last is None or any(not isinstance(m, int) or m > _MAX_PREFIX for m in lengths[:-1]):
        return None
    offset = sum(int(m) for m in lengths[:-1])
    if lengths[-1] == 1 and offset:
        return None  # its normal form has lost the step
    concatenated = last.shifted(-last.coefficients[axis] * offset)
    position = 0
    for part, length in zip(formulas[:-1], lengths[:-1], strict=True):
        for i in range(int(length)):
            if part is None or part.at(axis, i) != concatenated.at(axis, position + i):
                return None
        position += int(length)
    return concatenated


# Split(x, split?, axis, num_outputs?): pieces of lengths `split`, or `num_outputs` of one length; the last is the rest.


def split(op: Builder, x: ir.Value, lengths: Sequence[Size], axis: int) -> tuple[ir.Value, ...]:
    """Split x along `axis` into pieces of these lengths; return x itself for a single one."""
    if len(lengths) <= 1:
        return (x,) * len(lengths)
    shape = sizes.dims_of(x)
    axis = normalize_axis(axis, len(shape))
    types = [TensorType(dtype_of(x), (*shape[:axis], length, *shape[axis + 1 :])) for length in lengths]
    node = op.node("", "Split", (x, op.sizes(lengths)), {"axis": axis}, types=types)
    return tuple(node.outputs)


def _lengths(n: NodeView) -> tuple[Size, ...]:
    if n.split is not None:
        return required_ints(n.split, "the lengths of Split")
    total, count = sizes.dims_of(n.x)[axis_of(n, n.x)], len(n.node.outputs)
    each = sizes.floor_divide(sizes.add(total, count - 1), count)
    last = sizes.subtract(total, sizes.multiply(each, count - 1))
    if isinstance(last, int) and last < 0:
        raise GraphError(
            "Split: too many pieces of equal length",
            expected=f"pieces of {each}, the last not negative",
            got=f"{count} pieces of an axis of {total}",
            todo="pass the lengths of the pieces",
        )
    return (*(each,) * (count - 1), last)


def _split_types(n: NodeView) -> Sequence[TensorType]:
    axis, shape, lengths = axis_of(n, n.x), sizes.dims_of(n.x), _lengths(n)
    total = sizes.add(*lengths)
    if isinstance(total, int) and isinstance(shape[axis], int) and total != shape[axis]:
        raise GraphError(
            "Split: the lengths do not add up to the size of the axis",
            expected=f"a sum of {shape[axis]}",
            got=f"{total}, of {lengths}",
        )
    return [TensorType(dtype_of(n.x), (*shape[:axis], length, *shape[axis + 1 :])) for length in lengths]


def split_count(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> int:
    """Return the number of pieces: that of the lengths, or `num_outputs`."""
    if len(inputs) > 1 and inputs[1] is not None:
        count = sizes.dims_of(inputs[1])[0]
        if not isinstance(count, int):
            raise GraphError(
                "Split: the number of pieces must be static",
                expected="a vector of lengths whose size is an integer",
                got=f"{inputs[1].name} of size {count}",
            )
        return count
    if attributes.get("num_outputs") is None:
        raise GraphError(
            "Split: neither lengths nor num_outputs given", expected="one of both", todo="set the attribute num_outputs"
        )
    return int(attributes["num_outputs"])


def _split_evenly(x: torch.Tensor, count: int, axis: int) -> Sequence[torch.Tensor]:
    each = -(-x.size(axis) // count)
    return torch.split_with_sizes(x, [each] * (count - 1) + [x.size(axis) - each * (count - 1)], axis)


def _lower_split(n: NodeView, x: Any, lengths: Any) -> Call:
    axis = axis_of(n, n.x)
    if lengths is None:
        return Call(_split_evenly, x, len(n.node.outputs), axis)
    return Call(torch.split_with_sizes, x, lengths, axis)


def _split_gradient(op: Builder, n: NodeView, *dys: ir.Value | None) -> Sequence[ir.Value | None]:
    """Concatenate the cotangents, with zeros for absent ones."""
    parts = [
        dy if dy is not None else op.Expand(op.scalar(0.0, like=y), op.shape_of(y))
        for dy, y in zip(dys, n.node.outputs, strict=True)
    ]
    return [concatenated(op, parts, axis_of(n, n.x)), None][: len(n.node.inputs)]


def _split_axes(n: NodeView) -> str:
    axis = axis_of(n, n.x)
    names = axis_names("a", rank_of(n.x))
    outputs = [[f"y{i}" if k == axis else name for k, name in enumerate(names)] for i in range(len(n.node.outputs))]
    return format_axis_map([names, *[None] * (len(n.node.inputs) - 1)], *outputs)


def _capture_split(op: Builder, x: ir.Value, sections: Any = None, dim: int = 0) -> tuple[ir.Value, ...]:
    """Capture any ATen split: the lengths of the pieces are those of its outputs."""
    axis = normalize_axis(dim, rank_of(x))
    return split(op, x, [out.shape[axis] for out in op.out], axis)


def _capture_split_along(axis: int) -> Any:
    """Capture `hsplit`, `vsplit` or `dsplit`, which split a vector along its only axis."""

    def capture(op: Builder, x: ir.Value, sections: Any) -> tuple[ir.Value, ...]:
        return _capture_split(op, x, sections, 0 if rank_of(x) == 1 else axis)

    return capture


def _capture_unbind(op: Builder, x: ir.Value, dim: int = 0) -> tuple[ir.Value, ...]:
    """Capture one view per index as Split and Squeeze: the gradient is one Concat."""
    axis = normalize_axis(dim, rank_of(x))
    pieces = split(op, x, [1] * len(op.out), axis)
    return tuple(op.Squeeze(piece, int64_vector(op, [axis])) for piece in pieces)


SPLIT = define_movement(
    "Split",
    ("x", "split?"),
    _split_types,
    _lower_split,
    _split_gradient,
    outputs=("ys...",),
    host_inputs=frozenset({1}),
    attributes={"axis": 0, "num_outputs": None},
    from_torch={
        "aten.split.Tensor": _capture_split,
        "aten.split.sizes": _capture_split,
        "aten.split_with_sizes.default": _capture_split,
        "aten.split_copy.Tensor": _capture_split,
        "aten.split_with_sizes_copy.default": _capture_split,
        "aten.chunk.default": _capture_split,
        "aten.tensor_split.sections": _capture_split,
        "aten.tensor_split.indices": _capture_split,
        "aten.unsafe_split.Tensor": _capture_split,
        "aten.unsafe_split_with_sizes.default": _capture_split,
        "aten.unsafe_chunk.default": _capture_split,
        "aten.hsplit.int": _capture_split_along(1),
        "aten.hsplit.array": _capture_split_along(1),
        "aten.vsplit.int": _capture_split_along(0),
        "aten.vsplit.array": _capture_split_along(0),
        "aten.dsplit.int": _capture_split_along(2),
        "aten.dsplit.array": _capture_split_along(2),
        "aten.unbind.int": _capture_unbind,
        "aten.unbind_copy.int": _capture_unbind,
    },
    axes=_split_axes,
    view=True,
    nondiff_inputs=frozenset({"split"}),
    count_outputs=split_count,
    moved_inputs=frozenset({"x"}),
)
