"""A layer of PyTorch's LSTM, GRU or RNN, of one or both directions, with weights in PyTorch's format.

    LSTMLayer(x[s, b, i], h0[D, b, h], c0[D, b, h], weights) -> y[s, b, D h], h[D, b, h], c[D, b, h], saved
    LSTMLayerGrad(dy, dh, dc, x, h0, c0, weights, y, c, saved) -> dx, dh0, dc0, the gradient of each weight

and GRULayer and RNNLayer, without c. The weights of a direction are w_ih[G h, i], w_hh[G h, h], b_ih and b_hh[G h];
those of the reverse direction, if any, follow. ONNX's own LSTM, GRU and RNN require another order of the gates and all
weights in one tensor: each training step would copy weights and gradients, as the body does.

`saved` holds, as bytes, the values that the forward kernel saves for backward. The body saves none; the backward body
recomputes the gates of all steps at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import OWN, TensorType, dtype_of, type_of
from onnxtrain.ops.body_parts import cast, empty_saved_value, reshaped
from onnxtrain.ops.constructors import no_axes
from onnxtrain.ops.definition import NOT_DIFFERENTIABLE, Call, Effects, Gradient, Kernel, NodeView, OpDef
from onnxtrain.ops.gradient_masks import output_mask
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.native_kernels import may_compile
from onnxtrain.ops.recurrent import compiled_lstm, direction_bodies, layer_kernels
from onnxtrain.ops.recurrent.cells import CELLS, LSTM, RNN, Cell
from onnxtrain.ops.recurrent.direction_bodies import Direction
from onnxtrain.ops.registry import define
from onnxtrain.ops.reshape.dims import transposed
from onnxtrain.ops.reshape.join import concatenated, split

Grads = Sequence[ir.Value | None]
_DIRECTION = ("w_ih", "w_hh", "b_ih", "b_hh")
WEIGHTS = (*_DIRECTION, *(f"{name}_reverse" for name in _DIRECTION))
_OPTIONAL = tuple(name if name in ("w_ih", "w_hh") else f"{name}?" for name in WEIGHTS)
_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})


def _initial_names(cell: Cell) -> tuple[str, ...]:
    return ("h0", "c0") if cell.has_state else ("h0",)


def _weights(n: NodeView) -> list[ir.Value | None]:
    return [getattr(n, name) for name in WEIGHTS]


def _relu(n: NodeView) -> bool:
    return "activation" in n.definition.attributes and n.activation == "Relu"


def _is_bidirectional(weights: Sequence[ir.Value | None]) -> bool:
    return len(weights) > len(_DIRECTION) and weights[len(_DIRECTION)] is not None


def _types(cell: Cell, n: NodeView) -> Sequence[TensorType]:
    x, h0, w = sizes.dims_of(n.x), sizes.dims_of(n.h0), sizes.dims_of(n.w_ih)
    if len(x) != 3 or len(h0) != 3 or len(w) != 2:
        raise GraphError(
            f"{n.definition.name} got inputs of the wrong rank",
            expected="x[s, b, i], h0[D, b, h] and w_ih[G h, i]",
            got=f"{x}, {h0}, {w}",
        )
    dtypes = {dtype_of(v) for v in (n.x, n.h0, *_weights(n)) if v is not None}
    if len(dtypes) > 1:
        raise GraphError(
            f"the inputs of {n.definition.name} have different dtypes",
            expected="one dtype",
            got=", ".join(sorted(dtype.name for dtype in dtypes)),
        )
    directions = 2 if _is_bidirectional(_weights(n)) else 1
    last = TensorType(dtype_of(n.x), (directions, x[1], h0[2]))
    y = TensorType(dtype_of(n.x), (*x[:2], sizes.multiply(directions, h0[2])))
    saved = TensorType(ir.DataType.UINT8, ("saved_bytes",))
    return y, *[last] * len(_initial_names(cell)), *[saved] * directions


def _output_count(cell: Cell, inputs: Sequence[ir.Value | None]) -> int:
    states = len(_initial_names(cell))
    return 1 + states + 1 + _is_bidirectional(inputs[1 + states :])


def _flops(cell: Cell, n: NodeView, times: int) -> Size:
    x, h = sizes.dims_of(n.x), sizes.dims_of(n.h0)[2]
    directions = 2 if _is_bidirectional(_weights(n)) else 1
    return sizes.multiply(2 * times * directions * cell.gates, *x[:2], h, sizes.add(x[2], h))


_TRAINS = "trains"  # metadata of nodes through which a gradient flows


def _trains(n: NodeView) -> bool:
    """Return whether forward runs the kernel that saves values for backward: also where backward recomputes the layer.

    oneDNN's kernel that saves nothing rounds differently, and both runs must agree bit for bit.
    """
    is_read = any(v is not None and traversal.is_used(v) for v in (n.saved, n.saved_reverse))
    return is_read or _TRAINS in n.node.metadata_props


def _may_compile(cell: Cell, n: NodeView) -> bool:
    """Return whether compiled kernels may run; if so, requests them."""
    allowed = cell is LSTM and may_compile(n, "cpu")
    if allowed:
        compiled_lstm.LIBRARY.request()
    return allowed


def _lower(cell: Cell, n: NodeView, x: Any, h0: Any, *rest: Any) -> Call:
    c0, weights = (rest[0], rest[1:]) if cell.has_state else (None, rest)
    return Call(layer_kernels.layer, cell, _relu(n), _trains(n), _may_compile(cell, n), x, h0, c0, *weights)


# Body


def _directions(op: Builder, cell: Cell, n: NodeView, dtype: ir.DataType) -> list[Direction]:
    weights = [None if v is None else cast(op, v, dtype) for v in _weights(n)]
    count = 2 if _is_bidirectional(weights) else 1
    h, c = (
        [None] * count
        if v is None
        else [direction_bodies.select(op, cast(op, v, dtype), i, count) for i in range(count)]
        for v in (n.h0, n.c0 if cell.has_state else None)
    )
    directions = []
    for i in range(count):
        w, r, b, d = weights[4 * i : 4 * i + 4]
        initial_h = h[i]
        assert w is not None
        assert r is not None
        assert initial_h is not None
        directions.append(Direction(cell, cell.torch, w, r, b, d, initial_h, c[i], reverse=i == 1, relu=_relu(n)))
    return directions


def _compute_dtype(value: ir.Value) -> ir.DataType:
    return ir.DataType.FLOAT if dtype_of(value) in _HALF else dtype_of(value)


def _body(op: Builder, cell: Cell, n: NodeView) -> Grads:
    """ONNX's op in float32, which is all that stock onnxruntime supports; a Scan in double."""
    wide, dtype = _compute_dtype(n.x), dtype_of(n.x)
    x, directions = cast(op, n.x, wide), _directions(op, cell, n, wide)
    if wide == ir.DataType.FLOAT:
        y_by_direction, h, c = direction_bodies.onnx_layer(op, directions, x)
        steps, samples, width = sizes.dims_of(n.y)
        y = reshaped(op, transposed(op, y_by_direction, [0, 2, 1, 3]), [steps, samples, width])
    else:
        runs = [direction_bodies.forward(op, direction, x) for direction in directions]
        y = concatenated(op, [run[0] for run in runs], -1)
        h = direction_bodies.stack(op, [run[1] for run in runs])
        c = direction_bodies.stack(op, [run[2] for run in runs]) if cell.has_state else None
    saved = [empty_saved_value(op, v) for v in (n.saved, n.saved_reverse) if v is not None]
    last = [cast(op, v, dtype) for v in (h, c) if v is not None]
    return [cast(op, y, dtype), *last, *saved]


# Gradient


def _gradient(op: Builder, cell: Cell, n: NodeView, *cotangents: ir.Value | None) -> Grads:
    n.node.metadata_props[_TRAINS] = "yes"
    weights = _weights(n)
    initial_states = [getattr(n, name) for name in _initial_names(cell)]
    last_c = [n.c] if cell.has_state else []
    mask = [output_mask(n, "x")[0], int(any(output_mask(n, *WEIGHTS)))]
    dx, *rest = op.op(OWN, f"{n.definition.name}Grad")(
        *cotangents[: 1 + len(initial_states)],
        *(n.x, *initial_states, *weights, n.y, *last_c, n.saved, n.saved_reverse),
        output_mask=None if all(mask) else mask,
        activation="Relu" if _relu(n) else None,
    )
    dstates, dweights = rest[: len(initial_states)], iter(rest[len(initial_states) :])
    dweight_by_input = [None if v is None else next(dweights) for v in weights]
    gradients: Grads = [dx if mask[0] else None, *dstates, *(g if mask[1] else None for g in dweight_by_input)]
    return gradients[: len(n.node.inputs)]


def _grad_inputs(cell: Cell) -> tuple[str, ...]:
    cotangents = ("dy?", *(f"d{name[0]}?" for name in _initial_names(cell)))
    last = ("c",) if cell.has_state else ()
    return (*cotangents, "x", *_initial_names(cell), *_OPTIONAL, "y", *last, "saved", "saved_reverse?")


def _grad_types(cell: Cell, n: NodeView) -> Sequence[TensorType]:
    initial_states = [getattr(n, name) for name in _initial_names(cell)]
    return [type_of(v) for v in (n.x, *initial_states, *_weights(n)) if v is not None]


def _grad_output_count(cell: Cell, inputs: Sequence[ir.Value | None]) -> int:
    states = len(_initial_names(cell))
    return 1 + states + sum(v is not None for v in inputs[2 + 2 * states : 2 + 2 * states + len(WEIGHTS)])


def _lower_grad(cell: Cell, n: NodeView, *values: Any) -> Call:
    count = len(_initial_names(cell))
    cotangents, values = values[: 1 + count], values[1 + count :]
    x, initial_states, values = values[0], values[1 : 1 + count], values[1 + count :]
    weights, y, rest = values[: len(WEIGHTS)], values[len(WEIGHTS)], values[len(WEIGHTS) + 1 :]
    if not cell.has_state:
        cotangents, initial_states, rest = (*cotangents, None), (*initial_states, None), (None, *rest)
    return Call(
        layer_kernels.layer_backward,
        cell,
        _relu(n),
        (bool(n.output_mask[0]), bool(n.output_mask[1])),
        _may_compile(cell, n),
        *cotangents,
        x,
        *initial_states,
        tuple(weights),
        y,
        *rest,
    )


def _grad_body(op: Builder, cell: Cell, n: NodeView) -> Grads:
    wide, dtype = _compute_dtype(n.x), dtype_of(n.x)
    directions, x = _directions(op, cell, n, wide), cast(op, n.x, wide)
    count = len(directions)
    width = sizes.dims_of(n.h0)[2]
    ys, dys = (
        [None] * count if v is None else list(split(op, cast(op, v, wide), [width] * count, -1)) for v in (n.y, n.dy)
    )
    dlast = [None if v is None else cast(op, v, wide) for v in (n.dh, n.dc if cell.has_state else None)]
    gradients = []
    for i, direction in enumerate(directions):
        y = ys[i]
        assert y is not None
        gates = {}
        if cell is not RNN:
            h_before = direction_bodies.previous_states(op, direction, direction.h, y)
            gates = direction_bodies.compute_gates(op, direction, x, h_before)
        states = direction_bodies.cell_states(op, direction, gates) if cell.has_state else None
        cotangents = [dys[i], *(None if v is None else direction_bodies.select(op, v, i, count) for v in dlast)]
        gradients.append(direction_bodies.backward(op, direction, x, y, gates, states, cotangents))
    dx = gradients[0].x if count == 1 else op.Add(gradients[0].x, gradients[1].x)
    dstates = [direction_bodies.stack(op, [g.h for g in gradients])]
    if cell.has_state:
        dstates.append(direction_bodies.stack(op, [g.c for g in gradients]))
    dweights = [
        dw
        for g, direction in zip(gradients, directions, strict=True)
        for dw in (g.w, g.r, *((g.b, g.d) if direction.b is not None else ()))
    ]
    return [cast(op, v, dtype) for v in (dx, *dstates, *dweights) if v is not None]


# Definitions


def _define(cell: Cell) -> None:
    activation: Mapping[str, Any] = {"activation": "Tanh"} if cell is RNN else {}
    last = ("h", "c") if cell.has_state else ("h",)
    common: dict[str, Any] = {
        "domain": OWN,
        "from_torch": {},
        "nondiff_inputs": frozenset(),
        "axes": no_axes,
        "effects": Effects.NONE,
        "aliases": {},
    }
    op = define(
        OpDef(
            **common,
            name=f"{cell.name}Layer",
            inputs=("x", *_initial_names(cell), *_OPTIONAL),
            outputs=("y", *last, "saved", "saved_reverse?"),
            attributes=activation,
            shapes=lambda n: _types(cell, n),
            body=lambda op, n: _body(op, cell, n),
            gradient=(
                Gradient(
                    lambda op, n, *cotangents: _gradient(op, cell, n, *cotangents),
                    reads=("x", *_initial_names(cell), *WEIGHTS, "y", *last[1:], "saved", "saved_reverse"),
                ),
            ),
            kernels=(Kernel(lower=lambda n, *values: _lower(cell, n, *values)),),
            count_outputs=lambda inputs, attributes: _output_count(cell, inputs),
        )
    )
    FLOPS.register(op, lambda n: _flops(cell, n, 1))
    op = define(
        OpDef(
            **common,
            name=f"{cell.name}LayerGrad",
            inputs=_grad_inputs(cell),
            outputs=("dx", *(f"d{name}" for name in _initial_names(cell)), "dweights..."),
            attributes={**activation, "output_mask": (1, 1)},
            shapes=lambda n: _grad_types(cell, n),
            body=lambda op, n: _grad_body(op, cell, n),
            gradient=NOT_DIFFERENTIABLE,
            kernels=(Kernel(lower=lambda n, *values: _lower_grad(cell, n, *values)),),
            count_outputs=lambda inputs, attributes: _grad_output_count(cell, inputs),
        )
    )
    FLOPS.register(op, lambda n: _flops(cell, n, 2))


for _cell in CELLS:
    _define(_cell)
