"""Converters of ONNX ops whose semantics differ from those of training graphs.

Constants; ops with a training mode; windows padded by name ("SAME_UPPER") or asymmetrically; shape arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.device.from_onnx.prepare import constant_number, trains
from onnxtrain.errors import ArtifactError
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import MICROSOFT, ONNX, constant_of, dtype_of, rank_of
from onnxtrain.ops.body_parts import cast, int64_vector, mean_over, mul_scalar, reshaped
from onnxtrain.ops.random.dropout import dropout_nodes
from onnxtrain.ops.recurrent.cells import GRU, LSTM, Cell
from onnxtrain.ops.recurrent.onnx_layers import unsupported_feature
from onnxtrain.ops.sliding_windows import auto_padding, cropped, spatial_sizes
from onnxtrain.ops.symbolic_ints import known_ints

INT64 = ir.DataType.INT64
Results = Sequence[ir.Value | None]
_PRODUCER_OF_TORCH = "pytorch"


@dataclass(frozen=True)
class Source:
    """A node of the imported model.

    Attributes:
        op: builds the training graph.
        node: the node as it was.
        inputs: its converted inputs.
        training: whether the graph is a training graph.
        producer: the name of the exporter.
        updates: collects updated running statistics: name → new value.
    """

    op: Builder
    node: ir.Node
    inputs: Sequence[ir.Value | None]
    training: bool
    producer: str
    updates: dict[str, ir.Value]

    def input(self, index: int) -> ir.Value | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def needs(self, index: int) -> ir.Value:
        value = self.input(index)
        if value is None:
            raise ArtifactError(f"{traversal.describe(self.node)} lacks input {index}.")
        return value

    def attribute(self, name: str, default: Any = None) -> Any:
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.value

    def refuse(self, problem: str, todo: str) -> ArtifactError:
        """Return an error about this node: its description followed by `problem`."""
        return ArtifactError(f"{traversal.describe(self.node)} {problem}.", traversal.origin(self.node), todo=todo)


Converter = Callable[[Source], Results]
CONVERTERS: dict[str, Converter] = {}


def _converts(name: str) -> Callable[[Converter], Converter]:
    def add(function: Converter) -> Converter:
        CONVERTERS[name] = function
        return function

    return add


# Constants and sizes


@_converts("Constant")
def _constant(s: Source) -> Results:
    name, attribute = next(iter(s.node.attributes.items()))
    if name == "value":
        tensor = attribute.as_tensor()
        return [s.op.constant(tensor.numpy(), tensor.dtype)]
    kinds = {"value_float": ir.DataType.FLOAT, "value_floats": ir.DataType.FLOAT}
    kinds |= {"value_int": INT64, "value_ints": INT64}
    if name not in kinds:
        raise s.refuse(f"has the attribute {name}", "write it as a dense tensor")
    return [s.op.constant(np.asarray(attribute.value), kinds[name])]


@_converts("Identity")
def _identity(s: Source) -> Results:
    return [s.needs(0)]


@_converts("EyeLike")
def _eye_like(s: Source) -> Results:
    shape = sizes.dims_of(s.needs(0))
    if any(isinstance(size, str) for size in shape):
        raise s.refuse("creates a matrix of dynamic size", "export the model with static sizes here")
    dtype = ir.DataType(s.attribute("dtype", dtype_of(s.needs(0))))
    rows, columns = (int(size) for size in shape)
    return [s.op.constant(np.eye(rows, columns, k=s.attribute("k", 0)), dtype)]


@_converts("Expand")
def _expand(s: Source) -> Results:
    """An expanded shape vector remains a shape vector."""
    x, target = s.needs(0), known_ints(s.needs(1))
    held = known_ints(x) if dtype_of(x) == INT64 and rank_of(x) <= 1 else None
    if held is not None and len(held) == 1 and target is not None and len(target) == 1 and isinstance(target[0], int):
        return [s.op.sizes(list(held) * target[0])]
    return [s.op.Expand(x, s.needs(1))]


def _held(value: ir.Value) -> sizes.Sizes | None:
    """Return the dimensions in a shape vector."""
    return known_ints(value) if dtype_of(value) == INT64 and rank_of(value) == 1 else None


def _aligned(*vectors: sizes.Sizes) -> list[sizes.Sizes]:
    """Repeat vectors of length 1 to the common length."""
    length = max(map(len, vectors))
    return [v * length if len(v) == 1 else v for v in vectors]


@_converts("Equal")
def _equal(s: Source) -> Results:
    """Exporters compare dimensions with -1: a symbolic dimension never equals it."""
    a, b = s.needs(0), s.needs(1)
    left, right = (_held(v) for v in (a, b))
    if left is not None and right is not None:
        pairs = list(zip(*_aligned(left, right), strict=True))
        if all(_is_decided(x, y) for x, y in pairs):
            return [s.op.constant([x == y for x, y in pairs], ir.DataType.BOOL)]
    return [s.op.Equal(a, b)]


def _is_decided(a: Size, b: Size) -> bool:
    """Return whether the equality of two dimensions is known; dimensions are not negative."""
    if a == b or (isinstance(a, int) and isinstance(b, int)):
        return True
    return any(isinstance(size, int) and size < 0 for size in (a, b))


@_converts("Where")
def _where(s: Source) -> Results:
    condition, left, right = constant_of(s.needs(0)), *(_held(s.needs(i)) for i in (1, 2))
    if condition is not None and condition.ndim == 1 and left is not None and right is not None:
        chosen, a, b = _aligned(tuple(int(c) for c in condition), left, right)
        return [s.op.sizes([x if c else y for c, x, y in zip(chosen, a, b, strict=True)])]
    return [s.op.Where(*(s.needs(i) for i in range(3)))]


# Training mode


@_converts("Dropout")
def _dropout(s: Source) -> Results:
    x, ratio, flag = s.needs(0), s.input(1), s.input(2)
    drops = constant_number(flag) if flag is not None else False
    chance = 0.5 if ratio is None else constant_number(ratio)
    if chance is None:
        raise s.refuse("has a computed dropout ratio", "export the model with a constant ratio")
    # A flag that is computed, or an input of the graph, says whether the graph trains.
    return dropout_nodes(s.op, x, float(chance), s.training and (drops is None or bool(drops)))


@_converts("BatchNormalization")
def _batch_norm(s: Source) -> Results:
    op, epsilon, momentum = s.op, s.attribute("epsilon", 1e-5), s.attribute("momentum", 0.9)
    x, scale, b, mean, var = (s.needs(index) for index in range(5))
    if not (s.training and trains(s.node)):
        return [op.BatchNormalization(x, scale, b, mean, var, epsilon=epsilon), mean, var]
    unbiased = s.producer == _PRODUCER_OF_TORCH
    y, moved_mean, moved_var, saved, _ = op.ms.BatchNormInternal(
        x, scale, b, mean, var if unbiased else None, epsilon=epsilon, momentum=momentum
    )
    if not unbiased:
        moved_var = _biased_variance(op, x, saved, var, momentum)
    for value, moved in zip((mean, var), (moved_mean, moved_var), strict=True):
        s.updates[str(value.name)] = moved
    return [y, moved_mean, moved_var]


def _biased_variance(op: Builder, x: ir.Value, mean: ir.Value, running: ir.Value, momentum: float) -> ir.Value:
    """Return the running variance as ONNX defines it: divided by the count, not by count - 1 as in PyTorch."""
    rank = rank_of(x)
    centred = op.Sub(x, reshaped(op, mean, [1, sizes.dims_of(x)[1], *[1] * (rank - 2)]))
    variance = mean_over(op, op.Mul(centred, centred), [axis for axis in range(rank) if axis != 1])
    moved = mul_scalar(op, reshaped(op, variance, [sizes.dims_of(x)[1]]), 1 - momentum)
    return op.Add(mul_scalar(op, running, momentum), moved)


def _recurrent(cell: Cell) -> Converter:
    """Convert an LSTM or GRU; in training to the op that also returns its gates, if PyTorch supports its features."""

    def convert(s: Source) -> Results:
        attributes = {name: attribute.value for name, attribute in s.node.attributes.items()}
        trained = s.training and unsupported_feature(cell, attributes, peepholes=s.input(7) is not None) is None
        domain, name = (MICROSOFT, f"{cell.name}Training") if trained else (ONNX, cell.name)
        return s.op.node(domain, name, s.inputs, attributes).outputs

    return convert


CONVERTERS["LSTM"] = _recurrent(LSTM)
CONVERTERS["GRU"] = _recurrent(GRU)


# Windows


@dataclass(frozen=True)
class _Windows:
    """Windows over the axes after the channels. `before` and `after` are the padding of each axis."""

    kernel: Sequence[int]
    strides: list[int]
    dilations: list[int]
    before: list[Size]
    after: list[Size]

    @property
    def symmetric(self) -> bool:
        return self.before == self.after and all(isinstance(pad, int) for pad in self.before)

    def attributes(self, *, padded: bool) -> dict[str, Any]:
        """Return strides, dilations and pads; no padding where a Pad node does it."""
        pads = [0] * (2 * len(self.before)) if padded else [*self.before, *self.after]
        return {"strides": self.strides, "dilations": self.dilations, "pads": pads}


def _windows(s: Source, kernel: Sequence[Size]) -> _Windows:
    count = rank_of(s.needs(0)) - 2
    if any(isinstance(k, str) for k in kernel):
        raise s.refuse("has a dynamic kernel size", "export the model with static weight shapes")
    fixed = [int(k) for k in kernel]
    strides, dilations = (list(s.attribute(name) or [1] * count) for name in ("strides", "dilations"))
    pads: list[Size] = list(s.attribute("pads") or [0] * (2 * count))
    named = s.attribute("auto_pad", "NOTSET")
    padding = auto_padding(named, pads, spatial_sizes(s.needs(0)), fixed, strides, dilations)
    return _Windows(fixed, strides, dilations, [before for before, _ in padding], [after for _, after in padding])


def _padded(s: Source, x: ir.Value, windows: _Windows, fill: float) -> ir.Value:
    pads = s.op.sizes([*windows.before, *windows.after])
    return s.op.Pad(x, pads, s.op.scalar(fill, like=x), int64_vector(s.op, range(2, rank_of(x))))


@_converts("Conv")
def _conv(s: Source) -> Results:
    x, w = s.needs(0), s.needs(1)
    windows = _windows(s, spatial_sizes(w))
    padded = not windows.symmetric
    if padded:
        x = _padded(s, x, windows, 0.0)
    group = s.attribute("group", 1)
    return [s.op.Conv(x, w, s.input(2), group=group, **windows.attributes(padded=padded))]


@_converts("ConvTranspose")
def _conv_transpose(s: Source) -> Results:
    if s.attribute("output_shape") is not None or s.attribute("auto_pad", "NOTSET").startswith("SAME"):
        raise s.refuse("sets output_shape", "export it with pads and output_padding")
    x, w = s.needs(0), s.needs(1)
    windows = _windows(s, spatial_sizes(w))
    attributes = {"group": s.attribute("group", 1), "output_padding": s.attribute("output_padding")}
    if windows.symmetric:
        return [s.op.ConvTranspose(x, w, s.input(2), **attributes, **windows.attributes(padded=False))]
    uncropped = s.op.ConvTranspose(x, w, s.input(2), **attributes, **windows.attributes(padded=True))
    starts = [int(pad) for pad in windows.before]
    cut = zip(spatial_sizes(uncropped), windows.before, windows.after, strict=True)
    return [cropped(s.op, uncropped, starts, [sizes.subtract(size, sizes.add(a, b)) for size, a, b in cut])]


@_converts("MaxPool")
def _max_pool(s: Source) -> Results:
    if s.attribute("storage_order", 0) and len(s.node.outputs) > 1 and traversal.is_used(s.node.outputs[1]):
        raise s.refuse("returns column-major indices", "export it with storage_order=0")
    x, windows = s.needs(0), _windows(s, s.attribute("kernel_shape"))
    padded = not windows.symmetric
    if padded:
        if len(s.node.outputs) > 1 and traversal.is_used(s.node.outputs[1]):
            raise s.refuse("returns indices of an asymmetrically padded input", "pad equally at both ends")
        x = _padded(s, x, windows, -np.inf)
    attributes = {"kernel_shape": windows.kernel, "ceil_mode": s.attribute("ceil_mode", 0)}
    return s.op.MaxPool(x, **attributes, **windows.attributes(padded=padded))  # two outputs


@_converts("AveragePool")
def _average_pool(s: Source) -> Results:
    x, windows = s.needs(0), _windows(s, s.attribute("kernel_shape"))
    if any(dilation != 1 for dilation in windows.dilations):
        raise s.refuse("has dilated windows, which PyTorch lacks", "write it as a Conv with equal weights")
    attributes = {"kernel_shape": windows.kernel, "ceil_mode": s.attribute("ceil_mode", 0), "strides": windows.strides}
    if windows.symmetric:
        counted = s.attribute("count_include_pad", 0)
        return [s.op.AveragePool(x, **attributes, pads=[*windows.before, *windows.after], count_include_pad=counted)]
    y = s.op.AveragePool(_padded(s, x, windows, 0.0), **attributes)
    if s.attribute("count_include_pad", 0):
        return [y]
    ones = s.op.Expand(s.op.scalar(1.0, like=x), s.op.sizes([1, 1, *spatial_sizes(x)]))
    return [s.op.Div(y, s.op.AveragePool(_padded(s, ones, windows, 0.0), **attributes))]


# Casts to the type that a value has: exporters write many


@_converts("Cast")
def _cast(s: Source) -> Results:
    return [cast(s.op, s.needs(0), ir.DataType(s.attribute("to")))]


@_converts("CastLike")
def _cast_like(s: Source) -> Results:
    """Convert to Cast, so that a constant stays constant even if the second input is computed."""
    return [cast(s.op, s.needs(0), dtype_of(s.needs(1)))]
