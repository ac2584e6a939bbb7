"""Pad, and the gradient of its modes that copy elements.

    Pad(x, pads, value?, axes?) -> y              pads lists the padding before each axis, then that after each axis
    PadGrad(dy, shape, pads, axes?) -> dx         the sum over the copies of each element

Modes: constant (`value`, 0 by default; negative padding crops), reflect (mirrors at the border element, which is not
repeated), edge (repeats the border element) and wrap (continues at the other end). PyTorch has kernels of reflect and
edge for one to three last axes; everything else is padded row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import OWN, TensorType, constant_of, dtype_of, rank_of
from onnxtrain.ops.body_parts import int64_vector
from onnxtrain.ops.definition import Call, Kernel, Method, NodeView
from onnxtrain.ops.reshape.movement import axis_names, checked_axis, constant_ints, define_movement, format_axis_map
from onnxtrain.ops.reshape.rows import arange
from onnxtrain.ops.symbolic_ints import required_ints

_TORCH_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
_ONNX_MODES = {torch_mode: mode for mode, torch_mode in _TORCH_MODES.items()}
_BACKWARD = {
    ("reflect", 1): torch.ops.aten.reflection_pad1d_backward.default,
    ("reflect", 2): torch.ops.aten.reflection_pad2d_backward.default,
    ("reflect", 3): torch.ops.aten.reflection_pad3d_backward.default,
    ("edge", 1): torch.ops.aten.replication_pad1d_backward.default,
    ("edge", 2): torch.ops.aten.replication_pad2d_backward.default,
    ("edge", 3): torch.ops.aten.replication_pad3d_backward.default,
}


def _pads(n: NodeView, rank: int) -> list[tuple[int, Size, Size]]:
    """Return (axis, before, after) of each padded axis."""
    if n.mode not in _TORCH_MODES:
        raise GraphError("Pad: unsupported mode", expected=" or ".join(_TORCH_MODES), got=n.mode)
    axes = tuple(range(rank)) if n.axes is None else constant_ints(n.axes, "the axes of Pad")
    pads = required_ints(n.pads, "the pads of Pad")
    befores, afters = pads[: len(pads) // 2], pads[len(pads) // 2 :]
    return [(checked_axis(a, rank, "an axis of Pad"), b, c) for a, b, c in zip(axes, befores, afters, strict=True)]


def _padded_type(n: NodeView) -> Sequence[TensorType]:
    shape = list(sizes.dims_of(n.x))
    for axis, before, after in _pads(n, len(shape)):
        shape[axis] = sizes.add(shape[axis], before, after)
    return (TensorType(dtype_of(n.x), tuple(shape)),)


def _torch_pads(n: NodeView, rank: int, pads: Any) -> list[Any]:
    """Return the pads in torch's order: before and after of each axis, from the last axis to the first padded one."""
    axes = [axis for axis, _, _ in _pads(n, rank)]
    by_axis: dict[int, tuple[Any, Any]] = dict(zip(axes, zip(pads, pads[len(axes) :], strict=False), strict=True))
    pairs = [by_axis.get(axis, (0, 0)) for axis in reversed(range(min(axes, default=0), rank))]
    while len(pairs) > 1 and n.mode != "constant" and pairs[-1] == (0, 0):
        pairs.pop()  # the kernels of these modes take no more axes than are padded
    return [pad for pair in pairs for pad in pair]


def _lower_pad(n: NodeView, x: Any, pads: Any, value: Any, axes: Any) -> Call:
    torch_pads = _torch_pads(n, rank_of(n.x), pads)
    if n.mode == "constant":
        return Call(torch.constant_pad_nd, x, torch_pads, _fill_value(n, value))
    if _has_kernel(n, n.x):
        return Call(torch.nn.functional.pad, x, torch_pads, _TORCH_MODES[n.mode])
    return Call(pad_rows, x, [axis for axis, _, _ in _pads(n, rank_of(n.x))], pads, n.mode)


def _has_kernel(n: NodeView, x: ir.Value) -> bool:
    """Return whether PyTorch has a kernel of this mode for these axes: the last ones, after one or two others."""
    rank = rank_of(x)
    first = min((axis for axis, before, after in _pads(n, rank) if (before, after) != (0, 0)), default=rank - 1)
    return (n.mode, rank - first) in _BACKWARD and rank - first < rank <= rank - first + 2


def _source_rows(like: torch.Tensor, size: int, before: int, after: int, mode: str) -> torch.Tensor:
    """Return the row that each row of a padded axis is a copy of, on the device of `like`."""
    positions = torch.arange(-before, size + after, device=like.device)
    if mode == "wrap":
        return positions % size
    if mode == "edge":
        return positions.clamp_(0, size - 1)
    period = max(2 * (size - 1), 1)
    return torch.minimum(positions % period, period - positions % period) if size > 1 else positions.zero_()


def pad_rows(x: torch.Tensor, axes: Sequence[int], pads: Sequence[int], mode: str) -> torch.Tensor:
    """Pad any axes by copying rows."""
    for axis, before, after in zip(axes, pads, pads[len(axes) :], strict=False):
        x = x.index_select(axis, _source_rows(x, x.size(axis), before, after, mode))
    return x


def pad_rows_backward(
    dy: torch.Tensor, shape: Sequence[int], axes: Sequence[int], pads: Sequence[int], mode: str
) -> torch.Tensor:
    for axis, before, after in reversed(list(zip(axes, pads, pads[len(axes) :], strict=False))):
        rows = _source_rows(dy, shape[axis], before, after, mode)
        zeros = dy.new_zeros([shape[axis] if i == axis else size for i, size in enumerate(dy.shape)])
        dy = zeros.index_add_(axis, rows, dy)
    return dy


def _fill_value(n: NodeView, value: Any) -> Any:
    """Return the value to pad with; a constant captured from a Python number without rounding it to x's type."""
    if n.value is None:
        return 0
    constant = constant_of(n.value)
    return Method("item", value) if constant is None else n.value.meta.get("scalar", constant.item())


def _pad_gradient(op: Builder, n: NodeView, dy: ir.Value) -> Sequence[ir.Value | None]:
    """Crop constant padding, by negative pads; sum over the copies of other modes."""
    padded = _pads(n, rank_of(n.x))
    axes = int64_vector(op, [axis for axis, _, _ in padded])
    if n.mode == "constant":
        amounts = [before for _, before, _ in padded] + [after for _, _, after in padded]
        dx = op.Pad(dy, op.sizes([sizes.multiply(-1, a) for a in amounts]), op.scalar(0, like=dy), axes)
    else:
        dx = op.own.PadGrad(dy, op.shape_of(n.x), n.pads, axes, mode=n.mode)
    return [dx, *[None] * (len(n.node.inputs) - 1)]


def _pad_axes(n: NodeView) -> str:
    padded = {axis for axis, before, after in _pads(n, rank_of(n.x)) if (before, after) != (0, 0)}
    names = axis_names("a", rank_of(n.x))
    inputs = [names, *[None] * (len(n.node.inputs) - 1)]
    return format_axis_map(inputs, [f"y{i}" if i in padded else name for i, name in enumerate(names)])


def _padded(op: Builder, x: ir.Value, pad: Sequence[Size], mode: str, value: complex = 0) -> ir.Value:
    """Pad x by torch's `pad`: (before, after) of each axis, from the last axis to the first padded one."""
    rank, count = rank_of(x), len(pad) // 2
    pairs = [(rank - 1 - i, pad[2 * i], pad[2 * i + 1]) for i in range(count)]
    if all(before == 0 == after for _, before, after in pairs):
        return x
    amounts = [before for _, before, _ in pairs] + [after for _, _, after in pairs]
    axes = int64_vector(op, [axis for axis, _, _ in pairs])
    fill_value = op.scalar(value, like=x) if mode == "constant" else None
    return op.node("", "Pad", (x, op.sizes(amounts), fill_value, axes), {"mode": mode}, types=[op.out[0]]).outputs[0]


def _capture_constant(op: Builder, x: ir.Value, pad: Sequence[Size], value: complex = 0) -> ir.Value:
    return _padded(op, x, pad, "constant", value)


def _capture_pad(
    op: Builder, x: ir.Value, pad: Sequence[Size], mode: str = "constant", value: float | None = None
) -> Any:
    if mode not in _ONNX_MODES:
        return NotImplemented
    if mode == "circular" and any(isinstance(p, int) and p < 0 for p in pad):
        return NotImplemented  # PyTorch wraps the cropped tensor, ONNX the whole one
    return _padded(op, x, pad, _ONNX_MODES[mode], 0 if value is None else value)


def _capture_mode(mode: str) -> Any:
    return lambda op, x, padding: _padded(op, x, padding, mode)


PAD = define_movement(
    "Pad",
    ("x", "pads", "value?", "axes?"),
    _padded_type,
    (
        Kernel(
            lower=_lower_pad,
            host_inputs=frozenset({1, 3}),
            synchronizes=lambda n: n.value is not None and constant_of(n.value) is None,
        ),
    ),
    _pad_gradient,
    attributes={"mode": "constant"},
    from_torch={
        "aten.constant_pad_nd.default": _capture_constant,
        "aten.pad.default": _capture_pad,
        "aten.reflection_pad1d.default": _capture_mode("reflect"),
        "aten.reflection_pad2d.default": _capture_mode("reflect"),
        "aten.reflection_pad3d.default": _capture_mode("reflect"),
        "aten.replication_pad1d.default": _capture_mode("edge"),
        "aten.replication_pad2d.default": _capture_mode("edge"),
        "aten.replication_pad3d.default": _capture_mode("edge"),
    },
    axes=_pad_axes,
    nondiff_inputs=frozenset({"pads", "value", "axes"}),
)


def _pad_grad(dy: torch.Tensor, shape: Any, torch_pads: list[int], kernel: Any) -> torch.Tensor:
    """Call a kernel, which reads only the sizes of the padded tensor."""
    return kernel(dy, dy.new_empty(shape), torch_pads)


def _lower_pad_grad(n: NodeView, dy: Any, shape: Any, pads: Any, axes: Any) -> Call:
    if not _has_kernel(n, n.dy):
        return Call(pad_rows_backward, dy, shape, [axis for axis, _, _ in _pads(n, rank_of(n.dy))], pads, n.mode)
    torch_pads = _torch_pads(n, rank_of(n.dy), pads)
    return Call(_pad_grad, dy, shape, torch_pads, _BACKWARD[n.mode, len(torch_pads) // 2])


def _pad_grad_body(op: Builder, n: NodeView) -> ir.Value:
    """Pad the indices 0, 1, 2, … of an axis alike: they list the row that each row of dy was copied from."""
    dx: ir.Value = n.dy
    shape = list(sizes.dims_of(n.dy))
    for axis, before, after in _pads(n, len(shape)):
        total = sizes.dims_of(n.dx)[axis]
        rows = op.Pad(arange(op, total), op.sizes([before, after]), mode=n.mode)
        shape[axis] = total
        dx = op.ms.GatherGrad(op.sizes(shape), rows, dx, axis=axis)
    return dx


def _pad_grad_axes(n: NodeView) -> str:
    padded = {axis for axis, _, _ in _pads(n, rank_of(n.dy))}
    names = [f"[w{i}]" if i in padded else name for i, name in enumerate(axis_names("a", rank_of(n.dy)))]
    inputs = [names, *[None] * (len(n.node.inputs) - 1)]
    return format_axis_map(inputs, [f"[x{i}]" if i in padded else name for i, name in enumerate(names)])


PAD_GRAD = define_movement(
    "PadGrad",
    ("dy", "shape", "pads", "axes?"),
    lambda n: (TensorType(dtype_of(n.dy), required_ints(n.shape, "the output shape of PadGrad")),),
    (
        Kernel(lower=_lower_pad_grad, host_inputs=frozenset({1, 2, 3}), applies=lambda n, device: device == "cpu"),
        Kernel(lower=_lower_pad_grad, host_inputs=frozenset({1, 2, 3}), deterministic=False),  # atomic additions
    ),
    None,
    domain=OWN,
    outputs=("dx",),
    attributes={"mode": "reflect"},
    body=_pad_grad_body,
    axes=_pad_grad_axes,
    nondiff_inputs=frozenset({"shape", "pads", "axes"}),
)
