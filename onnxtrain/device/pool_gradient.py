"""MaxPool's gradient without indices: the position of each window's maximum is recomputed from x and y.

WebGPU returns no indices, and onnxruntime (1.31) on a CPU takes 8 to 12 times as long for a pool with indices.

For non-overlapping windows, x is split into one tensor per window position, dy goes to the first of them that equals y,
and dx is assembled from them. For overlapping windows the positions are strided slices, which cost as much as indices
on a CPU; a ConvTranspose assembles dx.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import ArtifactError
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import ONNX, TensorType, dtype_of
from onnxtrain.ops import NodeView, builder
from onnxtrain.ops.body_parts import int64_vector, reshaped
from onnxtrain.ops.pool.window import MAX_POOL, MAX_POOL_GRAD, max_pool_of
from onnxtrain.ops.registry import view
from onnxtrain.ops.reshape.join import split
from onnxtrain.ops.sliding_windows import (
    attribute_per_axis,
    covered_size,
    cropped,
    padded_at_end,
    spatial_sizes,
    strided,
    symmetric_pads,
)


def pool_without_indices(graph: ir.Graph, *, overlapping: bool) -> None:
    """Replace MaxPoolGrad, which reads indices, by nodes that read x and y.

    Args:
        graph: modified in place.
        overlapping: whether overlapping windows are replaced too.

    Raises:
        ArtifactError: `overlapping`, and a MaxPoolGrad has computed indices.
    """
    op = builder(graph)
    for node in [n for n in graph if view(n).definition is MAX_POOL_GRAD]:
        pool = max_pool_of(view(node))
        if pool is None and overlapping:
            raise ArtifactError(
                f"{traversal.describe(node)} is not portable: its indices are computed, and WebGPU returns none.",
                where=traversal.origin(node),
                todo="use MaxPool without return_indices, or write the artifacts without portable=True",
            )
        if pool is None or not (overlapping or _is_non_overlapping(pool)):
            continue
        with op.at(node.metadata_props):
            gradient = _of_non_overlapping_windows if _is_non_overlapping(pool) else _of_overlapping_windows
            dx = gradient(op, pool, view(node).dy)
        traversal.replace(graph, node.outputs[0], dx)
        graph.remove(node, safe=True)
    _drop_indices(graph, op)
    traversal.sort(graph)
    traversal.name_uniquely(graph)


def _drop_indices(graph: ir.Graph, op: Builder) -> None:
    """Replace each MaxPool with unused indices by ONNX's, which can omit them."""
    for node in [n for n in graph if view(n).definition is MAX_POOL and not traversal.is_used(n.outputs[1])]:
        n = view(node)
        with op.at(node.metadata_props):
            pooled, _ = op.MaxPool(n.x, **{name: getattr(n, name) for name in MAX_POOL.attributes})
        pooled.producer().resize_outputs(1)
        traversal.replace(graph, n.y, pooled)
        graph.remove(node, safe=True)


def _geometry(n: NodeView) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return (kernel, strides, padding, dilations), each by axis."""
    count = len(spatial_sizes(n.x))
    rest = (
        attribute_per_axis(n, "strides", count, 1),
        symmetric_pads(n, count),
        attribute_per_axis(n, "dilations", count, 1),
    )
    return [int(k) for k in n.kernel_shape], *rest


def _is_non_overlapping(n: NodeView) -> bool:
    kernel, strides, pads, dilations = _geometry(n)
    return kernel == strides and not any(pads) and set(dilations) <= {1}


def _extent(n: NodeView) -> list[Size]:
    """Return the extent of the windows along each axis of the padded x."""
    kernel, strides, _, dilations = _geometry(n)
    return [covered_size(e, k, s, d) for e, k, s, d in zip(spatial_sizes(n.y), kernel, strides, dilations, strict=True)]


# Non-overlapping windows


def _of_non_overlapping_windows(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    kernel, reach = _geometry(n)[0], _extent(n)
    nothing = [0] * len(kernel)
    x = _padded(op, n.x, nothing, reach) if n.ceil_mode else n.x
    x = cropped(op, x, nothing, reach)
    zero = op.scalar(0.0, like=dy)
    assigned, shares = None, []
    for elements in _split_positions(op, x, kernel, spatial_sizes(n.y)):
        largest = op.Equal(elements, n.y)
        first = largest if assigned is None else op.And(largest, op.Not(assigned))
        assigned = largest if assigned is None else op.Or(assigned, largest)
        shares.append(op.Where(first, dy, zero))
    joined = _join_positions(op, shares, kernel, spatial_sizes(n.y))
    if n.ceil_mode:
        inner = cropped(op, joined, nothing, spatial_sizes(n.x))
    else:
        missing = [sizes.subtract(s, r) for s, r in zip(spatial_sizes(n.x), reach, strict=True)]
        inner = padded_at_end(op, joined, missing)
    return reshaped(op, inner, sizes.dims_of(n.x))


def _split_positions(op: Builder, x: ir.Value, kernel: Sequence[int], windows: Sequence[Size]) -> list[ir.Value]:
    """Split x into the tensors [n, c, windows] of all window positions, in row-major order."""
    parts = [x]
    for axis, (size, count) in enumerate(zip(kernel, windows, strict=True), start=2):
        pieces_of_axis = []
        for part in parts:
            before, after = sizes.dims_of(part)[:axis], sizes.dims_of(part)[axis + 1 :]
            windowed = reshaped(op, part, [*before, count, size, *after])
            pieces = split(op, windowed, [1] * size, axis + 1)
            pieces_of_axis += [reshaped(op, piece, [*before, count, *after]) for piece in pieces]
        parts = pieces_of_axis
    return parts


def _join_positions(op: Builder, parts: Sequence[ir.Value], kernel: Sequence[int], windows: Sequence[Size]) -> ir.Value:
    """Invert `_split_positions`."""
    for axis, size in reversed(list(enumerate(kernel, start=2))):
        joined = []
        for start in range(0, len(parts), size):
            members = parts[start : start + size]
            before, after = sizes.dims_of(members[0])[:axis], sizes.dims_of(members[0])[axis + 1 :]
            unsqueezed = [op.Unsqueeze(member, int64_vector(op, [axis + 1])) for member in members]
            row = op.Concat(*unsqueezed, axis=axis + 1) if size > 1 else unsqueezed[0]
            joined.append(reshaped(op, row, [*before, sizes.multiply(windows[axis - 2], size), *after]))
        parts = joined
    return parts[0]


# Overlapping windows


def _of_overlapping_windows(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    x, y = n.x, n.y
    kernel, strides, pads, dilations = _geometry(n)
    reach = _extent(n)
    padded = _padded(op, x, pads, reach)
    free, shares = None, []
    for offset in itertools.product(*map(range, kernel)):
        starts = [o * d for o, d in zip(offset, dilations, strict=True)]
        elements = strided(op, padded, starts, strides, spatial_sizes(y))
        share = op.Cast(op.Equal(elements, y), to=dtype_of(x))
        if free is not None:
            share = op.Mul(share, free)
        unassigned = op.Sub(op.scalar(1.0, like=x), share) if free is None else op.Sub(free, share)
        free = unassigned
        shares.append(op.Unsqueeze(op.Mul(share, dy), int64_vector(op, [2])))
    planes, windows = sizes.multiply(*sizes.dims_of(x)[:2]), len(shares)
    stacked = reshaped(op, op.Concat(*shares, axis=2), [planes, windows, *spatial_sizes(y)])
    kernel_positions = op.constant(np.eye(windows).reshape(windows, 1, *kernel), dtype_of(x))
    spread = op.ConvTranspose(stacked, kernel_positions, strides=strides, dilations=dilations)
    missing = [
        sizes.maximum(0, sizes.subtract(sizes.add(s, p), r))
        for s, p, r in zip(spatial_sizes(x), pads, reach, strict=True)
    ]
    inner = cropped(op, padded_at_end(op, spread, missing), pads, spatial_sizes(x))
    return reshaped(op, inner, sizes.dims_of(x))


def _padded(op: Builder, x: ir.Value, pads: list[int], reach: list[Size]) -> ir.Value:
    """Pad x with -inf to the extent of the windows."""
    after = [
        sizes.maximum(0, sizes.subtract(r, sizes.add(s, p)))
        for r, s, p in zip(reach, spatial_sizes(x), pads, strict=True)
    ]
    if not any(pads) and all(padding == 0 for padding in after):
        return x
    padded_sizes = [sizes.add(s, p, padding) for s, p, padding in zip(spatial_sizes(x), pads, after, strict=True)]
    inputs = (x, op.sizes([*pads, *after]), op.scalar(-np.inf, like=x), int64_vector(op, range(2, 2 + len(pads))))
    padded_type = TensorType(dtype_of(x), (*sizes.dims_of(x)[:2], *padded_sizes))
    return op.node(ONNX, "Pad", inputs, {}, types=[padded_type]).outputs[0]
