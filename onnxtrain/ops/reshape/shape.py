"""Shape, Size and Reshape."""

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
from onnxtrain.ops.body_parts import inferred_size, reshaped
from onnxtrain.ops.definition import Call, FromTorch, Method, NodeView
from onnxtrain.ops.interfaces.cpp import CPP, emit_reshape
from onnxtrain.ops.reshape.movement import define_movement, format_axis_map
from onnxtrain.ops.symbolic_ints import required_ints


def sizes_on_device(size_or_sizes: int | Sequence[int], device: torch.device) -> torch.Tensor:
    """Return one size as an int64 scalar, several as a vector.

    On a GPU the values are filled in: a copy from the host would synchronize.
    """
    if device.type == "cpu":
        return torch.tensor(size_or_sizes, dtype=torch.int64)
    if isinstance(size_or_sizes, int):
        return torch.full((), size_or_sizes, dtype=torch.int64, device=device)
    vector = torch.empty(len(size_or_sizes), dtype=torch.int64, device=device)
    for index, size in enumerate(size_or_sizes):
        vector[index].fill_(size)
    return vector


# Shape(x, start=0, end=None) -> the sizes of axes [start, end), an int64 vector. The elements of x are not read.


def _axes_of_shape(n: NodeView) -> range:
    rank = rank_of(n.x)
    start, end, _ = slice(n.start, n.end).indices(rank)
    return range(start, max(start, end))


def _shape_tensor(x: torch.Tensor, start: int, end: int) -> torch.Tensor:
    return sizes_on_device(x.shape[start:end], x.device)


def _lower_shape(n: NodeView, x: Any) -> Call:
    axes = _axes_of_shape(n)
    return Call(_shape_tensor, x, axes.start, axes.stop)


SHAPE = define_movement(
    "Shape",
    ("x",),
    lambda n: (TensorType(ir.DataType.INT64, (len(_axes_of_shape(n)),)),),
    _lower_shape,
    None,
    attributes={"start": 0, "end": None},
    host_eval=lambda n, x: tuple(x.size(i) for i in _axes_of_shape(n)),
    shape_only_inputs=frozenset({"x"}),
)


# Size(x) -> the number of elements of x


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
    host_eval=_numel_on_host,
    shape_only_inputs=frozenset({"x"}),
)


# Reshape(x, shape, allowzero=0). One size may be -1: it is inferred. Without allowzero, 0 stands for x's size there.


def _reshaped_type(n: NodeView) -> Sequence[TensorType]:
    source = sizes.dims_of(n.x)
    target = list(required_ints(n.shape, "the output shape of Reshape"))
    if not n.allowzero:
        target = [source[i] if s == 0 else s for i, s in enumerate(target)]
    unknown = [i for i, s in enumerate(target) if s == -1]
    if len(unknown) > 1:
        raise GraphError("Reshape: too many sizes to infer", expected="at most one size of -1", got=str(target))
    if unknown:
        target[unknown[0]] = inferred_size(source, target, unknown[0])
    source_numel, target_numel = sizes.multiply(1, *source), sizes.multiply(1, *target)
    if isinstance(source_numel, int) and isinstance(target_numel, int) and source_numel != target_numel:
        raise GraphError(
            "Reshape: the target shape and the input have different numbers of elements",
            expected=f"{source_numel} elements, as the input {list(source)} has",
            got=f"{target_numel}, {target}",
        )
    return (TensorType(dtype_of(n.x), tuple(target)),)


def _reshape_without_allowzero(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Reshape x; a size of 0 stands for x's size there."""
    return x.reshape([x.size(i) if s == 0 else s for i, s in enumerate(shape)])


def _lower_reshape(n: NodeView, x: Any, shape: Any) -> Call:
    target = as_sizes(n.shape)
    never_zero = target is not None and all(isinstance(s, int) and s != 0 for s in target)
    if n.allowzero or never_zero:
        return Method("reshape", x, shape)
    return Call(_reshape_without_allowzero, x, shape)


def _reshape_on_host(n: NodeView, x: Any, shape: Any) -> Any:
    if not isinstance(x, tuple):
        return x if shape == () else (x,)
    return x[0] if shape == () else x


def _reshape_axes(n: NodeView) -> str:
    left, right = factored(sizes.dims_of(n.x), sizes.dims_of(n.y))
    return format_axis_map([left, None], right)


def factored(source: Sizes, target: Sizes) -> tuple[list[str], list[str]]:
    """Return the axis names of both sides of a reshape.

    Axes split or merge between positions where the products of the leading sizes agree; other axes do not map.
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
        else:  # several axes became several others, or none (an [n] of one element): none of them maps
            for i in inner:
                left[i] = f"[x{i}]"
            for j in outer:
                right[j] = f"[y{j}]"
    return left, right


def _common_cuts(source: Sequence[Size], target: Sequence[Size]) -> list[tuple[int, int]]:
    """Return the positions where the products of both leading sizes are proven equal, from (0, 0) to the two ends."""
    prefix_products = {sizes.multiply(1, *target[:j]): j for j in range(len(target))}
    cuts = [(0, 0)]
    for i in range(1, len(source)):
        j = prefix_products.get(sizes.multiply(1, *source[:i]))
        if j:
            cuts.append((i, j))
    cuts.append((len(source), len(target)))
    return cuts


def _capture(op: Builder, x: ir.Value, *arguments: Any) -> ir.Value:
    """Capture an ATen call that only reshapes x to the shape of its output."""
    return reshaped(op, x, op.out[0].shape)


_FROM_TORCH: dict[str, FromTorch] = dict.fromkeys(
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
    _capture,
)

RESHAPE = define_movement(
    "Reshape",
    ("x", "shape"),
    _reshaped_type,
    _lower_reshape,
    lambda op, n, dy: (reshaped(op, dy, sizes.dims_of(n.x)), None),
    host_inputs=frozenset({1}),
    attributes={"allowzero": 0},
    from_torch=_FROM_TORCH,
    axes=_reshape_axes,
    view=True,
    host_eval=_reshape_on_host,
    nondiff_inputs=frozenset({"shape"}),
    preserves_elements=True,
    moved_inputs=frozenset({"x"}),
)
CPP.register(RESHAPE, emit_reshape)
