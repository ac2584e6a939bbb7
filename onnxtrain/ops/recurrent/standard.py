"""ONNX's LSTM, GRU and RNN, and what ONNX Runtime Training calls them where they train.

    LSTM(x[s, b, i], w[D, 4h, i], r[D, 4h, h], b[D, 8h]?, sequence_lens[b]?, initial_h[D, b, h]?, initial_c?, p?)
        -> y[s, D, b, h], y_h[D, b, h], y_c[D, b, h]
    LSTMTraining(as LSTM)                                 -> y, y_h, y_c, states[s, D, b, h], iofc[s, D, b, 4h]
    LSTMGrad(x, w, r, sequence_lens?, initial_h?, initial_c?, y, states, iofc, dy?, dy_h?, dy_c?)
        -> dx, dw, dr, db, dinitial_h, dinitial_c

GRUTraining keeps the gates zrh[s, D, b, 3h]; the gradient of an RNN needs y alone. D is 2 where the direction is
bidirectional. A sequence that is shorter than s has y = 0 after its end, where states and gates mean nothing.

Computed and differentiated is what PyTorch has too: the usual activations, an RNN's Relu, a GRU with
linear_before_reset. Others run on stock onnxruntime, where no gradient has to pass.
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
from onnxtrain.ops.composite import no_axes
from onnxtrain.ops.constructors import always, never
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
from onnxtrain.ops.fused import reshaped
from onnxtrain.ops.recurrent import unrolled
from onnxtrain.ops.recurrent.by_length import Layer, run, run_backward
from onnxtrain.ops.recurrent.cells import CELLS, GRU, LSTM, RNN, Cell
from onnxtrain.ops.recurrent.unrolled import Side
from onnxtrain.ops.registry import define
from onnxtrain.ops.reshape.dims import unsqueezed
from onnxtrain.ops.reshape.join import concatenated, split

Grads = Sequence[ir.Value | None]
_USUAL = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_REVERSE: Mapping[str, tuple[bool, ...]] = {
    "forward": (False,),
    "reverse": (True,),
    "bidirectional": (False, True),
}


# Facts


def _attributes(cell: Cell) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(("activation_alpha", "activation_beta", "activations", "clip"))
    found |= {"direction": "forward", "hidden_size": None, "layout": 0}
    if cell is LSTM:
        found["input_forget"] = 0
    if cell is GRU:
        found["linear_before_reset"] = 0
    return found


def _firsts(cell: Cell) -> tuple[str, ...]:
    return ("initial_h", "initial_c") if cell.has_state else ("initial_h",)


def _inputs(cell: Cell) -> tuple[str, ...]:
    found = ("x", "w", "r", "b?", "sequence_lens?", *(f"{name}?" for name in _firsts(cell)))
    return (*found, "p?") if cell.has_state else found


def _given(cell: Cell, n: NodeView) -> list[ir.Value | None]:
    return [getattr(n, name.rstrip("?")) for name in _inputs(cell)]


def _how(n: NodeView) -> dict[str, Any]:
    return {name: getattr(n, name) for name in n.node.attributes if name in n.definition.attributes}


def reason_against(cell: Cell, attributes: Mapping[str, Any], peepholes: bool = False) -> str | None:
    """What a layer has that PyTorch's has not; None where there is nothing.

    Args:
        cell: the kind of layer.
        attributes: those of the ONNX node.
        peepholes: whether it has the input P.
    """
    activations = attributes.get("activations")
    usual = _USUAL[cell.name]
    if activations and list(activations) not in (usual, usual * 2, ["Relu"], ["Relu"] * 2):
        return f"activations {list(activations)}"
    if activations and "Relu" in activations and cell is not RNN:
        return "an activation Relu"
    if cell is GRU and not attributes.get("linear_before_reset"):
        return "linear_before_reset=0"
    for name in ("activation_alpha", "activation_beta", "clip", "input_forget", "layout"):
        if attributes.get(name):
            return f"{name}={attributes[name]}"
    return "peepholes" if peepholes else None


def _refuse(cell: Cell, n: NodeView) -> None:
    reason = reason_against(cell, _how(n), cell.has_state and "p?" in n.definition.inputs and n.p is not None)
    if reason is not None:
        raise GraphError(
            f"{n.definition.name} with {reason} is neither computed nor differentiated here",
            expected="what PyTorch's layer does",
            todo="freeze what stands before it, or write it with other operators",
        )


def _relu(n: NodeView) -> bool:
    return "Relu" in (n.activations or ())


def _reverse(n: NodeView) -> tuple[bool, ...]:
    if n.direction not in _REVERSE:
        raise GraphError(f"{n.definition.name} has no such direction", ", ".join(_REVERSE), n.direction)
    return _REVERSE[n.direction]


def _sizes(n: NodeView) -> tuple[Size, Size, Size, Size]:
    """s, D, b and h."""
    x, r = sizes.dims_of(n.x), sizes.dims_of(n.r)
    if len(x) != 3 or len(r) != 3:
        raise GraphError(f"{n.definition.name} takes x, w and r of three axes", got=f"x{list(x)}, r{list(r)}")
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
    shapes: list[tuple[Size, ...]] = [y, *[last] * len(_firsts(cell))]
    if training:
        shapes += [y] * cell.has_state + [(*y[:3], sizes.multiply(cell.gates, hidden))]
    return [TensorType(dtype, shape) for shape in shapes]


def _grad_types(cell: Cell, n: NodeView) -> list[TensorType]:
    _, count, samples, hidden = _sizes(n)
    dtype = dtype_of(n.x)
    bias = TensorType(dtype, (count, sizes.multiply(2 * cell.gates, hidden)))
    first = TensorType(dtype, (count, samples, hidden))
    return [type_of(n.x), type_of(n.w), type_of(n.r), bias, *[first] * len(_firsts(cell))]


# Bodies


def _sides(op: Builder, cell: Cell, n: NodeView, bias: ir.Value | None) -> list[Side]:
    steps, count, samples, hidden = _sizes(n)
    zero = op.Expand(op.scalar(0.0, like=n.x), op.sizes([samples, hidden]))
    rows = sizes.multiply(cell.gates, hidden)
    inside = None
    if n.sequence_lens is not None:
        inside = unrolled.inside(op, n.sequence_lens, steps, dtype_of(n.x))
    found = []
    for d, reverse in enumerate(_reverse(n)):
        w, r = (unrolled.row(op, v, d, int(count)) for v in (n.w, n.r))
        firsts = [zero if v is None else unrolled.row(op, v, d, int(count)) for v in _first_values(cell, n)]
        b, back = None, None
        if bias is not None:
            b, back = split(op, unrolled.row(op, bias, d, int(count)), [rows, rows], 0)
        c = firsts[1] if cell.has_state else None
        found.append(Side(cell, cell.onnx, w, r, b, back, firsts[0], c, reverse, _relu(n), inside))
    return found


def _first_values(cell: Cell, n: NodeView) -> list[ir.Value | None]:
    return [getattr(n, name) for name in _firsts(cell)]


def _columns(op: Builder, value: ir.Value, count: int) -> list[ir.Value]:
    """value[s, D, ...] a direction at a time."""
    parts = split(op, value, [1] * count, 1)
    return [op.Squeeze(part, op.constant([1], ir.DataType.INT64)) for part in parts]


def _beside(op: Builder, values: Sequence[ir.Value]) -> ir.Value:
    return concatenated(op, [unsqueezed(op, v, 1) for v in values], 1)


def _training_body(op: Builder, cell: Cell, n: NodeView) -> Grads:
    """ONNX's own op, of which stock onnxruntime has a kernel in float32 only; then the gates of all steps at once."""
    _refuse(cell, n)
    sides = _sides(op, cell, n, n.b)
    if dtype_of(n.x) == ir.DataType.FLOAT:
        given = _given(cell, n)[: 5 + len(_firsts(cell))]
        how = {**_how(n), "hidden_size": unrolled.hidden_size(n.r)}
        last = list(op.op(ONNX, cell.name)(*given, **how))
    else:
        runs = [unrolled.forward(op, side, n.x) for side in sides]
        last = [_beside(op, [r[0] for r in runs]), unrolled.stacked(op, [r[1] for r in runs])]
        last += [unrolled.stacked(op, [r[2] for r in runs])] if cell.has_state else []
    if len(n.node.outputs) == len(last):
        return last
    gates, states = [], []
    for side, y in zip(sides, _columns(op, last[0], len(sides)), strict=True):
        parts = unrolled.gates(op, side, n.x, unrolled.before(op, side, side.h, y))
        gates.append(concatenated(op, [parts[gate] for gate in cell.onnx], -1))
        if cell.has_state:
            states.append(unrolled.cell_states(op, side, parts))
    return [*last, *([_beside(op, states)] if states else []), _beside(op, gates)]


def _grad_body(op: Builder, cell: Cell, n: NodeView) -> Grads:
    _refuse(cell, n)
    sides = _sides(op, cell, n, n.b if cell is GRU else None)
    count, hidden = len(sides), _sizes(n)[3]
    ys, dys = _columns(op, n.y, count), [None] * count if n.dy is None else _columns(op, n.dy, count)
    gates = _columns(op, n.zrh if cell is GRU else n.iofc, count) if cell is not RNN else []
    states = _columns(op, n.states, count) if cell.has_state else []
    found = []
    for d, side in enumerate(sides):
        parts: dict[str, ir.Value] = {}
        if gates:
            parts = dict(zip(cell.onnx, split(op, gates[d], [hidden] * cell.gates, -1), strict=True))
        if cell is GRU:
            parts["m"] = unrolled.gates(op, side, n.x, unrolled.before(op, side, side.h, ys[d]))["m"]
        last = [n.dy_h, n.dy_c if cell.has_state else None]
        given = [dys[d], *(None if v is None else unrolled.row(op, v, d, count) for v in last)]
        found.append(unrolled.backward(op, side, n.x, ys[d], parts, states[d] if states else None, given))
    dx = found[0].x if count == 1 else op.Add(found[0].x, found[1].x)
    weights = [unrolled.stacked(op, values) for values in ([f.w for f in found], [f.r for f in found])]
    bias = unrolled.stacked(op, [concatenated(op, [f.b, f.d], 0) for f in found])
    firsts = [unrolled.stacked(op, [f.h for f in found])]
    if cell.has_state:
        firsts.append(unrolled.stacked(op, [f.c for f in found]))
    return [reshaped(op, dx, sizes.dims_of(n.x)), *weights, bias, *firsts]


# Gradients


def _through_training(op: Builder, cell: Cell, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    """Of LSTM and GRU, which give no gates: the training op gives them again."""
    _refuse(cell, n)
    given = _given(cell, n)[: 5 + len(_firsts(cell))]
    kept = op.op(MICROSOFT, f"{cell.name}Training")(*given, **_how(n))[1 + len(_firsts(cell)) :]
    return _grad(op, cell, n, (n.y, *kept), cotangents)


def _of_training(op: Builder, cell: Cell, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    kept = (n.y, n.states, n.iofc) if cell is LSTM else (n.y, n.zrh) if cell is GRU else (n.y,)
    return _grad(op, cell, n, kept, cotangents[: 1 + len(_firsts(cell))])


def _grad(
    op: Builder, cell: Cell, n: NodeView, kept: Sequence[ir.Value], cotangents: Sequence[ir.Value | None]
) -> Grads:
    _refuse(cell, n)
    firsts = _first_values(cell, n)
    bias = (n.b,) if cell is GRU else ()
    dx, dw, dr, db, *dfirsts = op.op(_grad_domain(cell), f"{cell.name}Grad")(
        n.x, n.w, n.r, *bias, n.sequence_lens, *firsts, *kept, *cotangents, **_how(n)
    )
    return [dx, dw, dr, db, None, *dfirsts, None][: len(n.node.inputs)]


def _grad_domain(cell: Cell) -> str:
    return OWN if cell is RNN else MICROSOFT


def _grad_inputs(cell: Cell) -> tuple[str, ...]:
    bias = ("b?",) if cell is GRU else ()
    kept = {"LSTM": ("y", "states", "iofc"), "GRU": ("y", "zrh"), "RNN": ("y",)}[cell.name]
    last = ("dy?", "dy_h?", "dy_c?")[: 1 + len(_firsts(cell))]
    return ("x", "w", "r", *bias, "sequence_lens?", *(f"{name}?" for name in _firsts(cell)), *kept, *last)


# Kernels


def _layer_of(cell: Cell, n: NodeView) -> Layer:
    _refuse(cell, n)
    return Layer(cell, _reverse(n), _relu(n))


def _lower(cell: Cell, n: NodeView, *values: Any) -> Call:
    return Call(run, _layer_of(cell, n), len(n.node.outputs), *values[: 5 + len(_firsts(cell))])


def _has_lengths(n: NodeView) -> bool:
    return n.sequence_lens is not None


def _lower_grad(cell: Cell, n: NodeView, *values: Any) -> Call:
    named = dict(zip((name.rstrip("?") for name in _grad_inputs(cell)), values, strict=True))
    return Call(run_backward, _layer_of(cell, n), **named)


# Definitions


def _common(cell: Cell) -> dict[str, Any]:
    return {
        "from_torch": {},
        "attributes": _attributes(cell),
        "axes": no_axes,
        "effects": Effects.NONE,
        "aliases": {},
        "host_eval": None,
    }


def _define(cell: Cell) -> None:
    through: Callable[..., Grads] = _of_training if cell is RNN else _through_training
    outputs = ("y", "y_h", "y_c")[: 1 + len(_firsts(cell))]
    reads = ("x", "w", "r", "b", "sequence_lens", *_firsts(cell), "y")
    define(
        OpDef(
            **_common(cell),
            domain=ONNX,
            name=cell.name,
            inputs=_inputs(cell),
            outputs=tuple(f"{name}?" for name in outputs),
            since_version=7,
            shapes=lambda n: _types(cell, n),
            body=STANDARD,
            ort_compatible=always,
            gradient=(Gradient(lambda op, n, *given: through(op, cell, n, *given), reads=reads),),
            nondiff_inputs=frozenset({"sequence_lens"}),
            kernels=(Kernel(lower=lambda n, *values: _lower(cell, n, *values), synchronizes=_has_lengths),),
            flops=lambda n: _flops(cell, n, 1),
        )
    )
    define(
        OpDef(
            **_common(cell),
            domain=_grad_domain(cell),
            name=f"{cell.name}Grad",
            inputs=_grad_inputs(cell),
            outputs=("dx", "dw", "dr", "db", *(f"d{name}" for name in _firsts(cell))),
            since_version=1,
            shapes=lambda n: _grad_types(cell, n),
            body=lambda op, n: _grad_body(op, cell, n),
            ort_compatible=never,
            gradient=NOT_DIFFERENTIABLE,
            nondiff_inputs=frozenset(),
            kernels=(Kernel(lower=lambda n, *values: _lower_grad(cell, n, *values), synchronizes=_has_lengths),),
            flops=lambda n: _flops(cell, n, 2),
        )
    )


def _define_training(cell: Cell) -> None:
    last = ("y", "y_h", "y_c")[: 1 + len(_firsts(cell))]
    kept = ("states", "iofc") if cell is LSTM else ("zrh",)
    optional = tuple(f"{name}?" for name in kept)
    define(
        OpDef(
            **_common(cell),
            domain=MICROSOFT,
            name=f"{cell.name}Training",
            inputs=_inputs(cell),
            outputs=(*last, *optional),
            since_version=1,
            shapes=lambda n: _types(cell, n, training=True),
            body=lambda op, n: _training_body(op, cell, n),
            ort_compatible=never,
            gradient=(
                Gradient(
                    lambda op, n, *given: _of_training(op, cell, n, *given),
                    reads=("x", "w", "r", "b", "sequence_lens", *_firsts(cell), "y", *kept),
                ),
            ),
            nondiff_inputs=frozenset({"sequence_lens"}),
            kernels=(Kernel(lower=lambda n, *values: _lower(cell, n, *values), synchronizes=_has_lengths),),
            flops=lambda n: _flops(cell, n, 1),
            nondiff_outputs=frozenset(kept),
        )
    )


for _cell in CELLS:
    _define(_cell)
for _cell in (LSTM, GRU):
    _define_training(_cell)
