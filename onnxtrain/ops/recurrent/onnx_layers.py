"""ONNX's LSTM, GRU and RNN, and the ops of ONNX Runtime Training that train them.

    LSTM(x[s, b, i], w[D, 4h, i], r[D, 4h, h], b[D, 8h]?, sequence_lens[b]?, initial_h[D, b, h]?, initial_c?, p?)
        -> y[s, D, b, h], y_h[D, b, h], y_c[D, b, h]
    LSTMTraining(as LSTM)                                 -> y, y_h, y_c, states[s, D, b, h], iofc[s, D, b, 4h]
    LSTMGrad(x, w, r, sequence_lens?, initial_h?, initial_c?, y, states, iofc, dy?, dy_h?, dy_c?)
        -> dx, dw, dr, db, dinitial_h, dinitial_c

GRUTraining saves the gates zrh[s, D, b, 3h]; the gradient of an RNN needs only y. D is 2 for direction=bidirectional.
After the end of a sequence shorter than s, y is 0 and states and gates are undefined.

Kernels and gradients cover the layers that PyTorch has: the default activations, Relu for an RNN, and
linear_before_reset for a GRU. Others run only on stock onnxruntime, without a gradient.
Definition: https://onnx.ai/onnx/operators/onnx__LSTM.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import MICROSOFT, ONNX, OWN, TensorType, dtype_of, type_of
from onnxtrain.ops.body_parts import reshaped
from onnxtrain.ops.constructors import no_axes
from onnxtrain.ops.definition import (
    NOT_DIFFERENTIABLE,
    STANDARD,
    Call,
    Effects,
    Gradient,
    Kernel,
    NodeView,
    OpDef,
)
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.recurrent import direction_bodies
from onnxtrain.ops.recurrent.cells import CELLS, GRU, LSTM, RNN, Cell
from onnxtrain.ops.recurrent.direction_bodies import Direction
from onnxtrain.ops.recurrent.onnx_layer_kernels import Layer, run_layer, run_layer_backward
from onnxtrain.ops.registry import define
from onnxtrain.ops.reshape.dims import unsqueezed
from onnxtrain.ops.reshape.join import concatenated, split

Grads = Sequence[ir.Value | None]
_DEFAULT_ACTIVATIONS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_REVERSE: Mapping[str, tuple[bool, ...]] = {
    "forward": (False,),
    "reverse": (True,),
    "bidirectional": (False, True),
}


# Schema


def _attributes(cell: Cell) -> dict[str, Any]:
    attributes: dict[str, Any] = dict.fromkeys(("activation_alpha", "activation_beta", "activations", "clip"))
    attributes |= {"direction": "forward", "hidden_size": None, "layout": 0}
    if cell is LSTM:
        attributes["input_forget"] = 0
    if cell is GRU:
        attributes["linear_before_reset"] = 0
    return attributes


def _initial_names(cell: Cell) -> tuple[str, ...]:
    return ("initial_h", "initial_c") if cell.has_state else ("initial_h",)


def _inputs(cell: Cell) -> tuple[str, ...]:
    names = ("x", "w", "r", "b?", "sequence_lens?", *(f"{name}?" for name in _initial_names(cell)))
    return (*names, "p?") if cell.has_state else names


def _training_inputs(cell: Cell, n: NodeView) -> list[ir.Value | None]:
    """Return the inputs of the node without peepholes."""
    return [getattr(n, name.rstrip("?")) for name in _inputs(cell)][: 5 + len(_initial_names(cell))]


def _explicit_attributes(n: NodeView) -> dict[str, Any]:
    """Return the attributes that the node sets."""
    return {name: getattr(n, name) for name in n.node.attributes if name in n.definition.attributes}


def unsupported_feature(cell: Cell, attributes: Mapping[str, Any], peepholes: bool = False) -> str | None:
    """Return a feature of the layer that PyTorch's layer lacks; None if there is none.

    Args:
        cell: the kind of layer.
        attributes: those of the ONNX node.
        peepholes: whether the node has the input P.
    """
    activations = attributes.get("activations")
    default = _DEFAULT_ACTIVATIONS[cell.name]
    if activations and list(activations) not in (default, default * 2, ["Relu"], ["Relu"] * 2):
        return f"activations {list(activations)}"
    if activations and "Relu" in activations and cell is not RNN:
        return "an activation Relu"
    if cell is GRU and not attributes.get("linear_before_reset"):
        return "linear_before_reset=0"
    for name in ("activation_alpha", "activation_beta", "clip", "input_forget", "layout"):
        if attributes.get(name):
            return f"{name}={attributes[name]}"
    return "peepholes" if peepholes else None


def _check_supported(cell: Cell, n: NodeView) -> None:
    peepholes = cell.has_state and "p?" in n.definition.inputs and n.p is not None
    feature = unsupported_feature(cell, _explicit_attributes(n), peepholes)
    if feature is not None:
        raise GraphError(
            f"{n.definition.name} with {feature} has no kernel and no gradient",
            expected="a layer that PyTorch supports",
            todo="freeze the layers before it, or express it with other operators",
        )


def _relu(n: NodeView) -> bool:
    return "Relu" in (n.activations or ())


def _reverse(n: NodeView) -> tuple[bool, ...]:
    if n.direction not in _REVERSE:
        raise GraphError(
            f"unknown direction of {n.definition.name}", expected=", ".join(_REVERSE), got=str(n.direction)
        )
    return _REVERSE[n.direction]


def _sizes(n: NodeView) -> tuple[Size, Size, Size, Size]:
    """Return steps, directions, samples and hidden size."""
    x, r = sizes.dims_of(n.x), sizes.dims_of(n.r)
    if len(x) != 3 or len(r) != 3:
        raise GraphError(
            f"{n.definition.name} got inputs of the wrong rank",
            expected="x, w and r of rank 3",
            got=f"x{list(x)}, r{list(r)}",
        )
    steps, samples = (x[1], x[0]) if n.layout else (x[0], x[1])
    return steps, len(_reverse(n)), samples, r[2]


def _flops(cell: Cell, n: NodeView, times: int) -> Size:
    steps, count, samples, hidden = _sizes(n)
    width = sizes.add(sizes.dims_of(n.x)[2], hidden)
    return sizes.multiply(2 * times * cell.gates, steps, count, samples, hidden, width)


# Types


def _types(cell: Cell, n: NodeView, training: bool = False) -> list[TensorType]:
    steps, count, samples, hidden = _sizes(n)
    dtype = dtype_of(n.x)
    y, last = (steps, count, samples, hidden), (count, samples, hidden)
    if n.layout:
        y, last = (samples, steps, count, hidden), (samples, count, hidden)
    shapes: list[tuple[Size, ...]] = [y, *[last] * len(_initial_names(cell))]
    if training:
        shapes += [y] * cell.has_state + [(*y[:3], sizes.multiply(cell.gates, hidden))]
    return [TensorType(dtype, shape) for shape in shapes]


def _grad_types(cell: Cell, n: NodeView) -> list[TensorType]:
    _, count, samples, hidden = _sizes(n)
    dtype = dtype_of(n.x)
    bias = TensorType(dtype, (count, sizes.multiply(2 * cell.gates, hidden)))
    state = TensorType(dtype, (count, samples, hidden))
    return [type_of(n.x), type_of(n.w), type_of(n.r), bias, *[state] * len(_initial_names(cell))]


# Bodies


def _directions(op: Builder, cell: Cell, n: NodeView, bias: ir.Value | None) -> list[Direction]:
    steps, count, samples, hidden = _sizes(n)
    zeros = op.Expand(op.scalar(0.0, like=n.x), op.sizes([samples, hidden]))
    rows = sizes.multiply(cell.gates, hidden)
    mask = None
    if n.sequence_lens is not None:
        mask = direction_bodies.sequence_mask(op, n.sequence_lens, steps, dtype_of(n.x))
    directions = []
    for i, reverse in enumerate(_reverse(n)):
        w, r = (direction_bodies.select(op, v, i, int(count)) for v in (n.w, n.r))
        h, *cell_state = (
            zeros if v is None else direction_bodies.select(op, v, i, int(count)) for v in _initial_states(cell, n)
        )
        b, d = None, None
        if bias is not None:
            b, d = split(op, direction_bodies.select(op, bias, i, int(count)), [rows, rows], 0)
        c = cell_state[0] if cell.has_state else None
        directions.append(Direction(cell, cell.onnx, w, r, b, d, h, c, reverse, _relu(n), mask))
    return directions


def _initial_states(cell: Cell, n: NodeView) -> list[ir.Value | None]:
    return [getattr(n, name) for name in _initial_names(cell)]


def _split_directions(op: Builder, value: ir.Value, count: int) -> list[ir.Value]:
    """value[s, D, ...] as one value[s, ...] per direction."""
    parts = split(op, value, [1] * count, 1)
    return [op.Squeeze(part, op.constant([1], ir.DataType.INT64)) for part in parts]


def _join_directions(op: Builder, values: Sequence[ir.Value]) -> ir.Value:
    """Invert `_split_directions`."""
    return concatenated(op, [unsqueezed(op, v, 1) for v in values], 1)


def _training_body(op: Builder, cell: Cell, n: NodeView) -> Grads:
    """ONNX's op in float32, which is all that stock onnxruntime supports, else a Scan; then the gates of all steps."""
    _check_supported(cell, n)
    directions = _directions(op, cell, n, n.b)
    if dtype_of(n.x) == ir.DataType.FLOAT:
        attributes = {**_explicit_attributes(n), "hidden_size": direction_bodies.hidden_size(n.r)}
        outputs = list(op.op(ONNX, cell.name)(*_training_inputs(cell, n), **attributes))
    else:
        runs = [direction_bodies.forward(op, direction, n.x) for direction in directions]
        outputs = [_join_directions(op, [run[0] for run in runs]), direction_bodies.stack(op, [run[1] for run in runs])]
        outputs += [direction_bodies.stack(op, [run[2] for run in runs])] if cell.has_state else []
    if len(n.node.outputs) == len(outputs):
        return outputs
    saved_gates, states = [], []
    for direction, y in zip(directions, _split_directions(op, outputs[0], len(directions)), strict=True):
        h_before = direction_bodies.previous_states(op, direction, direction.h, y)
        gates = direction_bodies.compute_gates(op, direction, n.x, h_before)
        saved_gates.append(concatenated(op, [gates[gate] for gate in cell.onnx], -1))
        if cell.has_state:
            states.append(direction_bodies.cell_states(op, direction, gates))
    return [*outputs, *([_join_directions(op, states)] if states else []), _join_directions(op, saved_gates)]


def _grad_body(op: Builder, cell: Cell, n: NodeView) -> Grads:
    _check_supported(cell, n)
    directions = _directions(op, cell, n, n.b if cell is GRU else None)
    count, hidden = len(directions), _sizes(n)[3]
    ys = _split_directions(op, n.y, count)
    dys = [None] * count if n.dy is None else _split_directions(op, n.dy, count)
    saved_gates = _split_directions(op, n.zrh if cell is GRU else n.iofc, count) if cell is not RNN else []
    states = _split_directions(op, n.states, count) if cell.has_state else []
    gradients = []
    for i, direction in enumerate(directions):
        gates: dict[str, ir.Value] = {}
        if saved_gates:
            gates = dict(zip(cell.onnx, split(op, saved_gates[i], [hidden] * cell.gates, -1), strict=True))
        if cell is GRU:
            h_before = direction_bodies.previous_states(op, direction, direction.h, ys[i])
            gates["m"] = direction_bodies.compute_gates(op, direction, n.x, h_before)["m"]
        dlast = [n.dy_h, n.dy_c if cell.has_state else None]
        cotangents = [dys[i], *(None if v is None else direction_bodies.select(op, v, i, count) for v in dlast)]
        direction_states = states[i] if states else None
        gradients.append(direction_bodies.backward(op, direction, n.x, ys[i], gates, direction_states, cotangents))
    dx = gradients[0].x if count == 1 else op.Add(gradients[0].x, gradients[1].x)
    dw, dr = (direction_bodies.stack(op, values) for values in ([g.w for g in gradients], [g.r for g in gradients]))
    db = direction_bodies.stack(op, [concatenated(op, [g.b, g.d], 0) for g in gradients])
    dstates = [direction_bodies.stack(op, [g.h for g in gradients])]
    if cell.has_state:
        dstates.append(direction_bodies.stack(op, [g.c for g in gradients]))
    return [reshaped(op, dx, sizes.dims_of(n.x)), dw, dr, db, *dstates]


# Gradients


def _gradient_by_recomputing(op: Builder, cell: Cell, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    """Return the gradient of LSTM and GRU, which do not return their gates: the training op recomputes them."""
    _check_supported(cell, n)
    training = op.op(MICROSOFT, f"{cell.name}Training")
    outputs = training(*_training_inputs(cell, n), **_explicit_attributes(n))
    return _build_grad(op, cell, n, (n.y, *outputs[1 + len(_initial_names(cell)) :]), cotangents)


def _gradient_from_saved(op: Builder, cell: Cell, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    saved = (n.y, n.states, n.iofc) if cell is LSTM else (n.y, n.zrh) if cell is GRU else (n.y,)
    return _build_grad(op, cell, n, saved, cotangents[: 1 + len(_initial_names(cell))])


def _build_grad(
    op: Builder, cell: Cell, n: NodeView, saved: Sequence[ir.Value], cotangents: Sequence[ir.Value | None]
) -> Grads:
    _check_supported(cell, n)
    states = _initial_states(cell, n)
    bias = (n.b,) if cell is GRU else ()
    dx, dw, dr, db, *dstates = op.op(_grad_domain(cell), f"{cell.name}Grad")(
        n.x, n.w, n.r, *bias, n.sequence_lens, *states, *saved, *cotangents, **_explicit_attributes(n)
    )
    return [dx, dw, dr, db, None, *dstates, None][: len(n.node.inputs)]


def _grad_domain(cell: Cell) -> str:
    return OWN if cell is RNN else MICROSOFT


def _grad_inputs(cell: Cell) -> tuple[str, ...]:
    bias = ("b?",) if cell is GRU else ()
    saved = {"LSTM": ("y", "states", "iofc"), "GRU": ("y", "zrh"), "RNN": ("y",)}[cell.name]
    last = ("dy?", "dy_h?", "dy_c?")[: 1 + len(_initial_names(cell))]
    return ("x", "w", "r", *bias, "sequence_lens?", *(f"{name}?" for name in _initial_names(cell)), *saved, *last)


# Kernels


def _layer_of(cell: Cell, n: NodeView) -> Layer:
    _check_supported(cell, n)
    return Layer(cell, _reverse(n), _relu(n))


def _lower(cell: Cell, n: NodeView, *values: Any) -> Call:
    return Call(run_layer, _layer_of(cell, n), len(n.node.outputs), *values[: 5 + len(_initial_names(cell))])


def _has_lengths(n: NodeView) -> bool:
    return n.sequence_lens is not None


def _lower_grad(cell: Cell, n: NodeView, *values: Any) -> Call:
    arguments = dict(zip((name.rstrip("?") for name in _grad_inputs(cell)), values, strict=True))
    return Call(run_layer_backward, _layer_of(cell, n), **arguments)


# Definitions


def _common(cell: Cell) -> dict[str, Any]:
    return {
        "from_torch": {},
        "attributes": _attributes(cell),
        "axes": no_axes,
        "effects": Effects.NONE,
        "aliases": {},
    }


def _define(cell: Cell) -> None:
    gradient: Callable[..., Grads] = _gradient_from_saved if cell is RNN else _gradient_by_recomputing
    outputs = ("y", "y_h", "y_c")[: 1 + len(_initial_names(cell))]
    reads = ("x", "w", "r", "b", "sequence_lens", *_initial_names(cell), "y")
    op = define(
        OpDef(
            **_common(cell),
            domain=ONNX,
            name=cell.name,
            inputs=_inputs(cell),
            outputs=tuple(f"{name}?" for name in outputs),
            shapes=lambda n: _types(cell, n),
            body=STANDARD,
            gradient=(Gradient(lambda op, n, *cotangents: gradient(op, cell, n, *cotangents), reads=reads),),
            nondiff_inputs=frozenset({"sequence_lens"}),
            kernels=(Kernel(lower=lambda n, *values: _lower(cell, n, *values), synchronizes=_has_lengths),),
        )
    )
    FLOPS.register(op, lambda n: _flops(cell, n, 1))
    op = define(
        OpDef(
            **_common(cell),
            domain=_grad_domain(cell),
            name=f"{cell.name}Grad",
            inputs=_grad_inputs(cell),
            outputs=("dx", "dw", "dr", "db", *(f"d{name}" for name in _initial_names(cell))),
            shapes=lambda n: _grad_types(cell, n),
            body=lambda op, n: _grad_body(op, cell, n),
            gradient=NOT_DIFFERENTIABLE,
            nondiff_inputs=frozenset(),
            kernels=(Kernel(lower=lambda n, *values: _lower_grad(cell, n, *values), synchronizes=_has_lengths),),
        )
    )
    FLOPS.register(op, lambda n: _flops(cell, n, 2))


def _define_training(cell: Cell) -> None:
    last = ("y", "y_h", "y_c")[: 1 + len(_initial_names(cell))]
    saved = ("states", "iofc") if cell is LSTM else ("zrh",)
    optional = tuple(f"{name}?" for name in saved)
    op = define(
        OpDef(
            **_common(cell),
            domain=MICROSOFT,
            name=f"{cell.name}Training",
            inputs=_inputs(cell),
            outputs=(*last, *optional),
            shapes=lambda n: _types(cell, n, training=True),
            body=lambda op, n: _training_body(op, cell, n),
            gradient=(
                Gradient(
                    lambda op, n, *cotangents: _gradient_from_saved(op, cell, n, *cotangents),
                    reads=("x", "w", "r", "b", "sequence_lens", *_initial_names(cell), "y", *saved),
                ),
            ),
            nondiff_inputs=frozenset({"sequence_lens"}),
            kernels=(Kernel(lower=lambda n, *values: _lower(cell, n, *values), synchronizes=_has_lengths),),
            nondiff_outputs=frozenset(saved),
        )
    )
    FLOPS.register(op, lambda n: _flops(cell, n, 1))


for _cell in CELLS:
    _define(_cell)
for _cell in (LSTM, GRU):
    _define_training(_cell)
