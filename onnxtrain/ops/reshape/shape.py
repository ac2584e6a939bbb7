"""Shape and Reshape: the sizes of a tensor, and the same elements under other sizes."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder, as_sizes
from onnxtrain.graph.sizes import Size, Sizes
from onnxtrain.graph.values import TensorType, dtype_of, rank_of
from onnxtrain.ops.body_parts import int64_vector
from onnxtrain.ops.definition import Call, FromTorch, Method, NodeView
from onnxtrain.ops.reshape.movement import define_movement, format_axis_map
from onnxtrain.ops.symbolic_ints import required_ints


def sizes_on_device(given: int | Sequence[int], device: torch.device) -> torch.Tensor:
    """A size as an int64 scalar, or several as a vector. No copy from the host, for which a GPU would be waited."""
    if device.type == "cpu":
        return torch.tensor(given, dtype=torch.int64)
    if isinstance(given, int):
        return torch.full((), given, dtype=torch.int64, device=device)
    found = torch.empty(len(given), dtype=torch.int64, device=device)
    for place, size in enumerate(given):
        found[place].fill_(size)
    return found


# Shape(x, start=0, end=None) -> the sizes of axes start to end, an int64 vector. x's elements are not read.


def _slice_of_axes(n: NodeView) -> range:
    rank = rank_of(n.x)
    start, end, _ = slice(n.start, n.end).indices(rank)
    return range(start, max(start, end))


def _shape_tensor(x: torch.Tensor, start: int, end: int) -> torch.Tensor:
    return sizes_on_device(x.shape[start:end], x.device)


def _lower_shape(n: NodeView, x: Any) -> Call:
    taken = _slice_of_axes(n)
    return Call(_shape_tensor, x, taken.start, taken.stop)


SHAPE = define_movement(
    "Shape",
    ("x",),
    lambda n: (TensorType(ir.DataType.INT64, (len(_slice_of_axes(n)),)),),
    _lower_shape,
    None,
    attributes={"start": 0, "end": None},
    since_version=15,
    host_eval=lambda n, x: tuple(x.size(i) for i in _slice_of_axes(n)),
    shape_only_inputs=frozenset({"x"}),
)


# Size(x) -> the number of x's elements


def _numel_on_host(n: NodeView, x: Any) -> Any:
    return functools.reduce(operator.mul, (x.size(i) for i in range(rank_of(n.x))), 1)


def _numel(x: torch.Tensor) -> torch.Tensor:
    return sizes_on_device(x.numel(), x.device)


SIZE = define_movement(
    "Size",
    ("x",),
    lambda n: (TensorType(ir.DataType.INT64, ()),),
    lambda n, x: Call(_numel, x),
    None,
    since_version=13,
    host_eval=_numel_on_host,
    shape_only_inputs=frozenset({"x"}),
)


# Reshape(x, shape, allowzero=0). One size may be -1: what is left. Without allowzero a 0 stands for x's size there.


def reshaped(op: Builder, x: ir.Value, wanted: Sequence[Size]) -> ir.Value:
    """Puts x under other sizes of as many elements; gives x itself where it has them.

    Where only one size is symbolic, the shape is a constant with -1 in its place: no size arithmetic is needed.
    """
    wanted = tuple(wanted)
    if sizes.dims_of(x) == wanted:
        return x
    symbolic = [i for i, s in enumerate(wanted) if isinstance(s, str)]
    result: ir.Value
    if (
        len(symbolic) == 1
        and 0 not in wanted
        and _what_is_left(sizes.dims_of(x), wanted, *symbolic) == wanted[symbolic[0]]
    ):
        result = op.Reshape(x, int64_vector(op, [-1 if isinstance(s, str) else s for s in wanted]))
    elif symbolic or 0 in wanted:
        result = op.Reshape(x, op.sizes(wanted), allowzero=1)
    else:
        result = op.Reshape(x, int64_vector(op, [s for s in wanted if isinstance(s, int)]))
    return result


def _what_is_left(source: Sizes, target: Sequence[Size], position: int) -> Size:
    rest = [s for i, s in enumerate(target) if i != position]
    return sizes.floor_divide(sizes.multiply(1, *source), sizes.multiply(1, *rest))


def _reshaped_type(n: NodeView) -> Sequence[TensorType]:
    source = sizes.dims_of(n.x)
    target = list(required_ints(n.shape, "the shape that Reshape gives"))
    if not n.allowzero:
        target = [source[i] if s == 0 else s for i, s in enumerate(target)]
    unknown = [i for i, s in enumerate(target) if s == -1]
    if len(unknown) > 1:
        raise GraphError("Reshape can infer one size", got=str(target))
    if unknown:
        target[unknown[0]] = _what_is_left(source, target, unknown[0])
    have, want = sizes.multiply(1, *source), sizes.multiply(1, *target)
    if isinstance(have, int) and isinstance(want, int) and have != want:
        raise GraphError("Reshape keeps the number of elements", expected=str(source), got=str(target))
    return (TensorType(dtype_of(n.x), tuple(target)),)


def _reshape_copying(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Reshape without allowzero: a size 0 is copied from x."""
    return x.reshape([x.size(i) if s == 0 else s for i, s in enumerate(shape)])


def _lower_reshape(n: NodeView, x: Any, shape: Any) -> Call:
    held = as_sizes(n.shape)
    never_zero = held is not None and all(isinstance(s, int) and s != 0 for s in held)
    if n.allowzero or never_zero:
        return Method("reshape", x, shape)
    return Call(_reshape_copying, x, shape)


def _reshape_on_host(n: NodeView, x: Any, shape: Any) -> Any:
    if not isinstance(x, tuple):
        return x if shape == () else (x,)
    return x[0] if shape == () else x


def _reshape_axes(n: NodeView) -> str:
    left, right = factored(sizes.dims_of(n.x), sizes.dims_of(n.y))
    return format_axis_map([left, None], right)


def factored(source: Sizes, target: Sizes) -> tuple[list[str], list[str]]:
    """The axis names of a reshape: where products of sizes agree, axes split or merge; elsewhere nothing passes.

    [b, s, 12*64] -> [b*s, 12, 64] is "a0 a1 (a2 a3)" -> "(a0 a1) a2 a3".
    [2, 4] -> [4, 2] is "[x0] [x1]" -> "[y0] [y1]".
    """
    left, right = ["1"] * len(source), ["1"] * len(target)
    if 0 in source or 0 in target:
        return [f"[x{i}]" for i in range(len(source))], [f"[y{i}]" for i in range(len(target))]
    xs = [i for i, s in enumerate(source) if s != 1]
    ys = [j for j, s in enumerate(target) if s != 1]
    cuts = _common_cuts([source[i] for i in xs], [target[j] for j in ys])
    for (i0, j0), (i1, j1) in itertools.pairwise(cuts):
        inner, outer = xs[i0:i1], ys[j0:j1]
        if len(inner) == 1 and outer:
            parts = [f"a{inner[0]}_{k}" for k in range(len(outer))]
            left[inner[0]] = f"({' '.join(parts)})" if len(parts) > 1 else parts[0]
            for j, part in zip(outer, parts, strict=True):
                right[j] = part
        elif len(outer) == 1 and inner:
            parts = [f"a{i}" for i in inner]
            right[outer[0]] = f"({' '.join(parts)})"
            for i, part in zip(inner, parts, strict=True):
                left[i] = part
        else:  # several axes became several others, or none, as [n] that is one element: none of them passes
            for i in inner:
                left[i] = f"[x{i}]"
            for j in outer:
                right[j] = f"[y{j}]"
    return left, right


def _common_cuts(source: Sequence[Size], target: Sequence[Size]) -> list[tuple[int, int]]:
    """Where the products of the leading sizes of both are proven equal, from (0, 0) to the two ends."""
    products = {sizes.multiply(1, *target[:j]): j for j in range(len(target))}
    cuts = [(0, 0)]
    for i in range(1, len(source)):
        j = products.get(sizes.multiply(1, *source[:i]))
        if j:
            cuts.append((i, j))
    cuts.append((len(source), len(target)))
    return cuts


def _to_output_sizes(op: Builder, x: ir.Value, *arguments: Any) -> ir.Value:
    """Any ATen call whose result is x under the sizes of its output."""
    return reshaped(op, x, op.out[0].shape)


_RESHAPES: dict[str, FromTorch] = {
    **dict.fromkeys(
        (
            "aten._reshape_alias.default",
            "aten._unsafe_view.default",
            "aten.atleast_1d.default",
            "aten.atleast_2d.default",
            "aten.atleast_3d.default",
            "aten.flatten.using_ints",
            "aten.ravel.default",
            "aten.reshape.default",
            "aten.reshape_as.default",
            "aten.unflatten.int",
            "aten.view.default",
            "aten.view_as.default",
            "aten.view_copy.default",
        ),
        _to_output_sizes,
    ),
}

RESHAPE = define_movement(
    "Reshape",
    ("x", "shape"),
    _reshaped_type,
    _lower_reshape,
    lambda op, n, dy: (reshaped(op, dy, sizes.dims_of(n.x)), None),
    takes_ints=frozenset({1}),
    attributes={"allowzero": 0},
    since_version=14,
    from_torch=_RESHAPES,
    axes=_reshape_axes,
    view=True,
    host_eval=_reshape_on_host,
    nondiff_inputs=frozenset({"shape"}),
    preserves_elements=True,
    moved_inputs=frozenset({"x"}),
)
