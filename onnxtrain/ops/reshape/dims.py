"""Transpose, Squeeze, Unsqueeze and Expand: permute, drop, add and broadcast axes. All are views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder, as_sizes
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import TensorType, dtype_of, normalize_axes, normalize_axis, rank_of
from onnxtrain.ops.body_parts import int64_vector, reshaped
from onnxtrain.ops.definition import Call, FromTorch, Method, NodeView
from onnxtrain.ops.interfaces.cpp import CPP, Array, Source, emit_reshape, shape_of
from onnxtrain.ops.interfaces.element_formulas import ELEMENT_FORMULAS, Formula, FormulaOf, broadcast, integers, mapped
from onnxtrain.ops.reshape.movement import axis_names, constant_ints, define_movement, format_axis_map
from onnxtrain.ops.symbolic_ints import required_ints

# Transpose(x, perm): axis i of y is axis perm[i] of x.


def transposed(op: Builder, x: ir.Value, perm: Sequence[int]) -> ir.Value:
    """Permute the axes of x; return x itself for the identity."""
    rank = rank_of(x)
    perm = [normalize_axis(p, rank) for p in perm]
    if perm == list(range(rank)):
        return x
    return op.Transpose(x, perm=perm)


def swapped(op: Builder, x: ir.Value, first: int, second: int) -> ir.Value:
    """Swap two axes of x."""
    rank = rank_of(x)
    perm = list(range(rank))
    if rank:
        perm[first], perm[second] = perm[second], perm[first]
    return transposed(op, x, perm)


def inverse(perm: Sequence[int]) -> list[int]:
    """Return the inverse of a permutation."""
    return [list(perm).index(i) for i in range(len(perm))]


def moved(rank: int, source: Sequence[int], target: Sequence[int]) -> list[int]:
    """Return the permutation that moves axes `source` to positions `target` and keeps the others in order."""
    pairs = zip(target, source, strict=True)
    source_of = {normalize_axis(t, rank): normalize_axis(s, rank) for t, s in pairs}
    others = iter([i for i in range(rank) if i not in source_of.values()])
    return [source_of[i] if i in source_of else next(others) for i in range(rank)]


def perm_of(n: NodeView) -> tuple[int, ...]:
    """Return the axis of x that each axis of y is."""
    rank = rank_of(n.x)
    perm = tuple(reversed(range(rank))) if n.perm is None else tuple(n.perm)
    if sorted(perm) != list(range(rank)):
        raise GraphError(
            "Transpose: perm must name every axis once", expected=f"a permutation of 0 to {rank - 1}", got=str(perm)
        )
    return perm


def _move_axes(op: Builder, x: ir.Value, source: int | Sequence[int], destination: int | Sequence[int]) -> ir.Value:
    source = [source] if isinstance(source, int) else source
    destination = [destination] if isinstance(destination, int) else destination
    return transposed(op, x, moved(rank_of(x), source, destination))


def _reverse_axes(op: Builder, x: ir.Value) -> ir.Value:
    return transposed(op, x, list(reversed(range(rank_of(x)))))


def _swap_last_two(op: Builder, x: ir.Value) -> ir.Value:
    return swapped(op, x, -2, -1)


def _capture_pixel_shuffle(op: Builder, x: ir.Value, factor: int) -> ir.Value:
    """Capture [.., c*r*r, h, w] -> [.., c, h*r, w*r]."""
    *outer, _, height, width = sizes.dims_of(x)
    channels, rank = op.out[0].shape[-3], len(outer)
    parts = reshaped(op, x, (*outer, channels, factor, factor, height, width))
    order = [*range(rank + 1), rank + 3, rank + 1, rank + 4, rank + 2]
    return reshaped(op, transposed(op, parts, order), op.out[0].shape)


def _capture_pixel_unshuffle(op: Builder, x: ir.Value, factor: int) -> ir.Value:
    """Capture [.., c, h*r, w*r] -> [.., c*r*r, h, w]."""
    *outer, channels, _, _ = sizes.dims_of(x)
    (height, width), rank = op.out[0].shape[-2:], len(outer)
    parts = reshaped(op, x, (*outer, channels, height, factor, width, factor))
    order = [*range(rank + 1), rank + 2, rank + 4, rank + 1, rank + 3]
    return reshaped(op, transposed(op, parts, order), op.out[0].shape)


def _capture_channel_shuffle(op: Builder, x: ir.Value, groups: int) -> ir.Value:
    batch, channels, *image = sizes.dims_of(x)
    parts = reshaped(op, x, (batch, groups, sizes.floor_divide(channels, groups), *image))
    order = [0, 2, 1, *range(3, 3 + len(image))]
    return reshaped(op, transposed(op, parts, order), sizes.dims_of(x))


TRANSPOSE = define_movement(
    "Transpose",
    ("x",),
    lambda n: (TensorType(dtype_of(n.x), tuple(sizes.dims_of(n.x)[p] for p in perm_of(n))),),
    lambda n, x: Call(torch.permute, x, perm_of(n)),
    lambda op, n, dy: op.Transpose(dy, perm=inverse(perm_of(n))),
    attributes={"perm": None},
    from_torch={
        "aten.permute.default": transposed,
        "aten.permute_copy.default": transposed,
        "aten.transpose.int": swapped,
        "aten.transpose_copy.int": swapped,
        "aten.swapaxes.default": swapped,
        "aten.swapdims.default": swapped,
        "aten.t.default": _reverse_axes,
        "aten.t_copy.default": _reverse_axes,
        "aten.numpy_T.default": _reverse_axes,
        "aten.mT.default": _swap_last_two,
        "aten.movedim.int": _move_axes,
        "aten.movedim.intlist": _move_axes,
        "aten.moveaxis.int": _move_axes,
        "aten.moveaxis.intlist": _move_axes,
        "aten.pixel_shuffle.default": _capture_pixel_shuffle,
        "aten.pixel_unshuffle.default": _capture_pixel_unshuffle,
        "aten.channel_shuffle.default": _capture_channel_shuffle,
    },
    axes=lambda n: format_axis_map([axis_names("a", rank_of(n.x))], [f"a{p}" for p in perm_of(n)]),
    view=True,
    moved_inputs=frozenset({"x"}),
)


@CPP.implements(TRANSPOSE)
def _transpose_in_cpp(source: Source, n: NodeView, inputs: list[Array]) -> list[Array]:
    (x,) = inputs
    return [x.with_dims([x.shape[p] for p in perm_of(n)], [x.strides[p] for p in perm_of(n)])]


ELEMENT_FORMULAS.register(TRANSPOSE, lambda n, formula_of: mapped(formula_of(n.x), perm_of(n)))


# Squeeze(x, axes): drops these axes, all of size 1; without `axes` every axis of size 1.


def _dropped_axes(n: NodeView) -> tuple[int, ...]:
    shape = sizes.dims_of(n.x)
    if n.axes is None:
        return tuple(i for i, s in enumerate(shape) if s == 1)
    axes = normalize_axes(constant_ints(n.axes, "the axes of Squeeze"), len(shape))
    if wrong := [shape[a] for a in axes if isinstance(shape[a], int) and shape[a] != 1]:
        raise GraphError("Squeeze: an axis to drop is not of size 1", expected="size 1", got=f"sizes {wrong}")
    return axes


def _squeezed_type(n: NodeView) -> Sequence[TensorType]:
    dropped = _dropped_axes(n)
    return (TensorType(dtype_of(n.x), tuple(s for i, s in enumerate(sizes.dims_of(n.x)) if i not in dropped)),)


def _squeeze_axes(n: NodeView) -> str:
    dropped = _dropped_axes(n)
    left = ["1" if i in dropped else f"a{i}" for i in range(rank_of(n.x))]
    inputs = [left] + [None] * (len(n.node.inputs) - 1)
    return format_axis_map(inputs, [word for word in left if word != "1"])


def _capture_squeeze(op: Builder, x: ir.Value, dim: int | Sequence[int] | None = None) -> ir.Value:
    """Capture a squeeze: PyTorch drops only axes of size 1, and the guards of the capture fix the output's rank."""
    shape = sizes.dims_of(x)
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    dropped = [a for a in normalize_axes(dims, len(shape)) if shape[a] == 1] if shape else []
    if len(shape) - len(dropped) != len(op.out[0].shape):
        return reshaped(op, x, op.out[0].shape)
    return squeezed(op, x, *dropped)


def squeezed(op: Builder, x: ir.Value, *axes: int) -> ir.Value:
    """Drop `axes`, all of size 1; return x itself if there are none."""
    return op.Squeeze(x, int64_vector(op, axes)) if axes else x


SQUEEZE = define_movement(
    "Squeeze",
    ("x", "axes?"),
    _squeezed_type,
    lambda n, x, axes: Call(torch.squeeze, x, _dropped_axes(n)),
    lambda op, n, dy: (op.Unsqueeze(dy, int64_vector(op, _dropped_axes(n))), None)[: len(n.node.inputs)],
    host_inputs=frozenset({1}),
    from_torch={
        "aten.squeeze.default": _capture_squeeze,
        "aten.squeeze.dim": _capture_squeeze,
        "aten.squeeze.dims": _capture_squeeze,
        "aten.squeeze_copy.default": _capture_squeeze,
        "aten.squeeze_copy.dim": _capture_squeeze,
        "aten.squeeze_copy.dims": _capture_squeeze,
    },
    axes=_squeeze_axes,
    preserves_elements=True,
    view=True,
    host_eval=lambda n, x, axes=None: x[0] if isinstance(x, tuple) and len(x) == 1 and _dropped_axes(n) else x,
    nondiff_inputs=frozenset({"axes"}),
    moved_inputs=frozenset({"x"}),
)
CPP.register(SQUEEZE, emit_reshape)


@ELEMENT_FORMULAS.implements(SQUEEZE)
def _squeeze_formula(n: NodeView, formula_of: FormulaOf) -> Formula | None:
    axes = integers(n.axes)
    if axes is None:
        return None
    removed = {normalize_axis(a, rank_of(n.x)) for a in axes}
    return mapped(formula_of(n.x), [i for i in range(rank_of(n.x)) if i not in removed])


# Unsqueeze(x, axes): adds axes of size 1 at these positions of the output.


def unsqueezed(op: Builder, x: ir.Value, *axes: int) -> ir.Value:
    """Add axes of size 1 at positions `axes` of the result; return x itself if there are none."""
    if not axes:
        return x
    positions = normalize_axes(axes, rank_of(x) + len(axes))
    return op.Unsqueeze(x, int64_vector(op, positions))


def _added_axes(n: NodeView) -> tuple[int, ...]:
    axes = constant_ints(n.axes, "the axes of Unsqueeze")
    rank = rank_of(n.x) + len(axes)
    positions = normalize_axes(axes, rank)
    if not positions or len(set(positions)) != len(positions) or any(not 0 <= a < rank for a in positions):
        raise GraphError(
            "Unsqueeze: axes must name distinct axes of the output, at least one",
            expected=f"axes in [{-rank}, {rank})",
            got=str(axes),
        )
    return positions


def _insert(items: Sequence[Any], positions: Sequence[int], inserted: Any) -> list[Any]:
    """Insert the same item at these positions of the result."""
    originals = iter(items)
    return [inserted if i in positions else next(originals) for i in range(len(items) + len(positions))]


def _lower_unsqueeze(n: NodeView, x: Any, axes: Any) -> Call:
    first, *others = _added_axes(n)
    call = Call(torch.unsqueeze, x, first)
    for axis in others:
        call = Call(torch.unsqueeze, call, axis)
    return call


def _unsqueeze_axes(n: NodeView) -> str:
    left = axis_names("a", rank_of(n.x))
    return format_axis_map([left, None], _insert(left, _added_axes(n), "1"))


UNSQUEEZE = define_movement(
    "Unsqueeze",
    ("x", "axes"),
    lambda n: (TensorType(dtype_of(n.x), tuple(_insert(sizes.dims_of(n.x), _added_axes(n), 1))),),
    _lower_unsqueeze,
    lambda op, n, dy: (op.Squeeze(dy, int64_vector(op, _added_axes(n))), None),
    host_inputs=frozenset({1}),
    from_torch={
        "aten.unsqueeze.default": unsqueezed,
        "aten.unsqueeze_copy.default": unsqueezed,
    },
    axes=_unsqueeze_axes,
    preserves_elements=True,
    view=True,
    host_eval=lambda n, x, axes: x if isinstance(x, tuple) else (x,),
    nondiff_inputs=frozenset({"axes"}),
    moved_inputs=frozenset({"x"}),
)
CPP.register(UNSQUEEZE, emit_reshape)


@ELEMENT_FORMULAS.implements(UNSQUEEZE)
def _unsqueeze_formula(n: NodeView, formula_of: FormulaOf) -> Formula | None:
    axes = integers(n.axes)
    return None if axes is None else mapped(formula_of(n.x), _insert(range(rank_of(n.x)), _added_axes(n), None))


# Expand(x, shape): x and `shape` broadcast against each other; a 1 in `shape` keeps x's size.


def expanded(op: Builder, x: ir.Value, shape: Sequence[Size]) -> ir.Value:
    """Broadcast x to `shape`; return x itself if it has this shape."""
    shape = tuple(shape)
    if sizes.dims_of(x) == shape:
        return x
    return op.Expand(x, op.sizes(shape))


def _expanded_type(n: NodeView) -> Sequence[TensorType]:
    target = required_ints(n.shape, "the output shape of Expand")
    return (TensorType(dtype_of(n.x), sizes.broadcast(sizes.dims_of(n.x), target)),)


def _expand_both(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, shape))


def _lower_expand(n: NodeView, x: Any, shape: Any) -> Call:
    # torch's expand takes the sizes of the output; in ONNX a size of x may exceed that of `shape`.
    if as_sizes(n.shape) == sizes.dims_of(n.y):
        return Method("expand", x, shape)
    return Call(_expand_both, x, shape)


def _expand_axes(n: NodeView) -> str:
    source, target = sizes.dims_of(n.x), sizes.dims_of(n.y)
    left, right = ["1"] * len(source), axis_names("a", len(target))
    offset = len(target) - len(source)
    for i, s in enumerate(source):
        if s == target[i + offset] != 1:
            left[i] = right[i + offset]
        elif s != 1:  # symbolic: 1 or equal at run time
            left[i], right[i + offset] = f"[x{i}]", f"[y{i + offset}]"
    return format_axis_map([left, None], right)


def _capture_expand(op: Builder, x: ir.Value, *arguments: Any, implicit: bool = False) -> ir.Value:
    return expanded(op, x, op.out[0].shape)


def _capture_broadcast_tensors(op: Builder, xs: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
    return tuple(expanded(op, x, out.shape) for x, out in zip(xs, op.out, strict=True))


def _capture_meshgrid(op: Builder, xs: Sequence[ir.Value], *, indexing: str = "ij") -> tuple[ir.Value, ...]:
    """Expand each vector along its own axis; "xy" swaps the first two axes."""
    axes = list(range(len(xs)))
    if indexing == "xy" and len(xs) >= 2:
        axes[0], axes[1] = 1, 0
    grids = []
    for x, axis, out in zip(xs, axes, op.out, strict=True):
        column = [-1 if i == axis else 1 for i in range(len(xs))]
        grids.append(expanded(op, op.Reshape(x, int64_vector(op, column)), out.shape))
    return tuple(grids)


_FROM_TORCH: dict[str, FromTorch] = {
    **dict.fromkeys(
        ("aten.expand.default", "aten.expand_copy.default", "aten.expand_as.default", "aten.broadcast_to.default"),
        _capture_expand,
    ),
    "aten.broadcast_tensors.default": _capture_broadcast_tensors,
    "aten.meshgrid.default": _capture_meshgrid,
    "aten.meshgrid.indexing": _capture_meshgrid,
}

EXPAND = define_movement(
    "Expand",
    ("x", "shape"),
    _expanded_type,
    _lower_expand,
    lambda op, n, dy: (dy, None),
    host_inputs=frozenset({1}),
    from_torch=_FROM_TORCH,
    axes=_expand_axes,
    view=True,
    nondiff_inputs=frozenset({"shape"}),
)
CPP.register(EXPAND, lambda source, n, inputs: [inputs[0].broadcast(shape_of(n.y))])
ELEMENT_FORMULAS.register(EXPAND, lambda n, formula_of: broadcast(formula_of(n.x), n.x, n.y))
